"""Sparse gradients beside the exchange: when they travel; and Horovod's local variables, which are refused."""

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case, run_cases

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck

keras = m.keras
EXCHANGES = {"PyFunc", "PyFuncStateless", "EagerPyFunc", "HorovodAllreduce", "HorovodGroupedAllreduce"}
"""Operations that wait for the other ranks: ours, and Horovod's own."""


def variables():
    """A variable whose gradient is exchanged, and a local one."""
    return tf.Variable(tf.zeros([64, 2])), tf.Variable(tf.zeros([3]))


def gradients_beside_local(shared, own, compression):
    """Gradients behind Horovod's tape, which leaves the one of ``own`` on its rank."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(shared) + tf.reduce_sum(own)
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    tape.register_local_source(own)
    return tape.gradient(loss, [shared, own])


# -- in graphs -----------------------------------------------------------------------------------------------------


class Graph:
    """A traced function's graph: which operations come before which."""

    def __init__(self, function):
        graph = function.get_concrete_function().graph.as_graph_def()
        self.nodes = {node.name: node for node in graph.node}
        fields = {field.name: value for field, value in graph.ListFields()}
        called = fields["library"].function if "library" in fields else ()
        self.functions = {f.signature.name: f.node_def for f in called}

    def of_type(self, kind):
        return [name for name, node in self.nodes.items() if node.op == kind]

    def before(self, name):
        """Types of all operations that run before the one of this name, those inside functions included."""
        seen, left, kinds = set(), [name], set()
        while left:
            for text in self.nodes[left.pop()].input:
                found = text.removeprefix("^").partition(":")[0]
                if found not in seen:
                    seen.add(found)
                    left.append(found)
                    kinds |= self._inside(self.nodes[found])
        return kinds

    def _inside(self, node):
        kinds, left, called = set(), [node], set()
        while left:
            each = left.pop()
            kinds.add(each.op)
            for value in each.attr.values():
                for name in [f.name for f in (value.func, *value.list.func) if f.name]:
                    if name not in called:
                        called.add(name)
                        left += self.functions[name]
        return kinds


@case
def sparse_gradients_travel_after_the_exchange():
    shared, table = tf.Variable(tf.zeros([64, 2])), tf.Variable(tf.zeros([10, 4]))
    compression = dgc.Compression.dgc(momentum=0, rampup_begin_step=99)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(shared) + tf.reduce_sum(tf.gather(table, [1, hvd.rank() + 2]))
        tape = dgc.DistributedGradientTape(tape, compression=compression)
        _, gradient = tape.gradient(loss, [shared, table])
        table.scatter_sub(gradient)

    graph = Graph(step)
    gathers = graph.of_type("HorovodAllgather")
    assert len(gathers) == 2, gathers
    for name in (*gathers, *graph.of_type("ResourceScatterSub")):
        assert graph.before(name) & EXCHANGES, (name, graph.before(name))
    step()
    wanted = np.zeros([10, 4])
    for rank in range(hvd.size()):
        wanted[[1, rank + 2]] -= 1.0 / hvd.size()
    np.testing.assert_allclose(np.asarray(table), wanted)


@case
def sparse_gradients_of_bfloat16_travel():
    """Horovod has no kernel for them, which would come to light behind the exchange of the others."""
    for dense in (False, True):
        for graph in (False, True):
            table = tf.Variable(tf.zeros([10, 4], tf.bfloat16))
            compression = None if dense else dgc.Compression.dgc(momentum=0, rampup_begin_step=99)
            optimizer = dgck.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
            slices = tf.IndexedSlices(tf.ones([1, 4], tf.bfloat16), tf.constant([hvd.rank()]), tf.constant([10, 4]))

            def one(optimizer=optimizer, slices=slices, table=table):
                optimizer.apply_gradients([(slices, table)])

            (tf.function(one) if graph else one)()
            found = np.asarray(table, np.float32)
            np.testing.assert_array_equal(found[: hvd.size()], -1.0 / hvd.size())
            assert not found[hvd.size() :].any()


@case
def what_is_refused_in_a_graph_moves_no_sparse_variable():
    """A momentum that one rank alone assigns: an error on all ranks, from which a reset leads on."""
    shared, table = tf.Variable(tf.zeros([64, 2])), tf.Variable(tf.zeros([10, 4]))
    inner = keras.optimizers.SGD(1.0)
    compression = dgc.Compression.dgc(optimizer=inner, rampup_begin_step=99)

    @tf.function
    def step():
        loss = lambda: tf.reduce_sum(shared) + tf.reduce_sum(tf.gather(table, [1, 2]))  # noqa: E731
        first, second = m.reduced(loss, [shared, table], compression)
        shared.assign_sub(first)
        table.scatter_sub(second)

    step()
    for _ in range(2):
        if hvd.rank() == 1:
            inner.momentum = 0.9
        before = [np.asarray(v).copy() for v in (shared, table)]
        m.assert_raises(step, "momentum=0")
        for variable, values in zip((shared, table), before, strict=True):
            np.testing.assert_array_equal(np.asarray(variable), values)
        inner.momentum = 0.0
        compression.reset()
        step()
        np.testing.assert_allclose(np.asarray(shared), before[0] - 1.0)


@case
def beside_a_decay_of_the_compressor_sparse_gradients_are_refused():
    for graph in (False, True):
        shared, table = tf.Variable(tf.zeros([64, 2])), tf.Variable(tf.zeros([10, 4]))
        compression = dgc.Compression.dgc(momentum=0, weight_decay=0.1)

        def step(shared=shared, table=table, compression=compression):
            loss = lambda: tf.reduce_sum(shared) + tf.reduce_sum(tf.gather(table, [1, 2]))  # noqa: E731
            shared.assign_sub(m.reduced(loss, [shared, table], compression)[0])

        words = "weight_decay=0.1 of the compressor would not act on", "sparse gradients"
        m.assert_raises(tf.function(step) if graph else step, *words)
        assert not np.asarray(shared).any()
        assert compression.stats.steps == 0


# -- behind Horovod's own classes ----------------------------------------------------------------------------------


@case
def horovods_tape_with_local_sources_is_refused():
    for graph in (False, True):
        shared, own = variables()
        compression = dgc.Compression.dgc([shared], momentum=0)

        def step(shared=shared, own=own, compression=compression):
            return gradients_beside_local(shared, own, compression)

        m.assert_raises(tf.function(step) if graph else step, "local variables")
        assert compression.stats.steps == 0


@case("legacy")
def horovods_optimizer_with_local_variables_is_refused():
    import horovod.tensorflow.keras as hvd_keras

    for passes in (1, 2):
        shared, own = variables()
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        compression = dgc.Compression.dgc([shared], optimizer=inner)
        distributed = hvd_keras.DistributedOptimizer(inner, compression=compression, backward_passes_per_step=passes)
        distributed.register_local_var(own)

        def step(distributed=distributed, shared=shared, own=own):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(shared) + tf.reduce_sum(own)
            gradients = tape.gradient(loss, [shared, own])
            return distributed._allreduce(gradients, [shared, own])

        m.assert_raises(lambda: [step() for _ in range(passes)], "local variables")  # noqa: B023


@case
def a_users_own_attributes_are_not_horovods():
    """A script's objects may call their own things as Horovod does."""

    class Script:
        def __init__(self):
            self.shared, self.own = variables()
            self.local_vars = self._local_vars = {self.own.ref()}
            self._local_sources = {self.own.ref()}
            inner = keras.optimizers.SGD(0.1, momentum=0.9)
            self.compression = dgc.Compression.dgc([self.shared], optimizer=inner, **m.SPARSITY_0)

        def step(self):
            return m.reduced(lambda: tf.reduce_sum(self.shared), [self.shared], self.compression, hvd)

    for graph in (False, True):
        script = Script()
        (gradient,) = (tf.function(script.step) if graph else script.step)()
        np.testing.assert_allclose(np.asarray(gradient), 1.0)
        assert script.compression.adoption.momentum == 0.9


if __name__ == "__main__":
    run_cases()
