"""Gradients that stay on their rank: when they are handed over, and what may not stand beside them."""

import adapters_tensorflow.workers.models as m
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from worker_tools import case, run_cases

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck
from dgc.errors import ConfigError

keras = m.keras
EXCHANGES = {"PyFunc", "PyFuncStateless", "EagerPyFunc", "HorovodAllreduce", "HorovodGroupedAllreduce"}
"""Operations that wait for the other ranks: ours, and Horovod's own."""


def variables():
    """A variable whose gradient is exchanged, and a local one."""
    return tf.Variable(tf.zeros([64, 2])), tf.Variable(tf.zeros([3]))


def gradients_beside_local(shared, own, compression, library=dgc):
    """Gradients of the sum of all variables behind a tape that leaves the one of ``own`` on its rank."""
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v) for v in (*shared, own)])
    tape = library.DistributedGradientTape(tape, compression=compression)
    tape.register_local_source(own)
    return tape.gradient(loss, [*shared, own])


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
def a_tape_hands_local_gradients_over_after_the_exchange():
    for compression in (dgc.Compression.dgc(momentum=0, rampup_begin_step=99), None):
        shared, own = variables()

        @tf.function
        def step(compression=compression, shared=shared, own=own):
            own.assign_sub(gradients_beside_local([shared], own, compression)[1])

        graph = Graph(step)
        (update,) = graph.of_type("AssignSubVariableOp")
        assert graph.before(update) & EXCHANGES, (compression, graph.before(update))
        step()
        np.testing.assert_allclose(np.asarray(own), -1.0 / hvd.size())


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
def what_is_refused_in_a_graph_moves_no_local_and_no_sparse_variable():
    """A momentum that one rank alone assigns: an error on all ranks, from which a reset leads on."""
    shared, own = variables()
    table, inner = tf.Variable(tf.zeros([10, 4])), keras.optimizers.SGD(1.0)
    compression = dgc.Compression.dgc(optimizer=inner, rampup_begin_step=99)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(shared) + tf.reduce_sum(own) + tf.reduce_sum(tf.gather(table, [1, 2]))
        tape = dgc.DistributedGradientTape(tape, compression=compression)
        tape.register_local_source(own)
        first, second, third = tape.gradient(loss, [shared, own, table])
        shared.assign_sub(first)
        own.assign_sub(second)
        table.scatter_sub(third)

    step()
    for _ in range(2):
        if hvd.rank() == 1:
            inner.momentum = 0.9
        before = [np.asarray(v).copy() for v in (shared, own, table)]
        m.assert_raises(step, "momentum=0")
        for variable, values in zip((shared, own, table), before, strict=True):
            np.testing.assert_array_equal(np.asarray(variable), values)
        inner.momentum = 0.0
        compression.reset()
        step()
        np.testing.assert_allclose(np.asarray(own), before[1] - 1.0 / hvd.size())


# -- beside momentum -----------------------------------------------------------------------------------------------


def ways():
    """name -> (compressor, what makes an eager step of a shared and a local gradient)."""

    def tape_step(compression, shared, own):
        gradients_beside_local([shared], own, compression)

    def optimizer_step(optimizer):
        def step(compression, shared, own):
            optimizer.register_local_var(own)
            optimizer.apply_gradients([(tf.ones([64, 2]), shared), (tf.ones([3]), own)])

        return step

    adopted = dgc.Compression.dgc(optimizer=keras.optimizers.SGD(1.0, momentum=0.9))
    given = dgc.Compression.dgc(momentum=0.9)
    wrapped = dgc.Compression.dgc()
    wrapper = dgck.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.9), compression=wrapped)
    paddle = dgck.DGCMomentum(1.0, 0.9, 0)
    return {
        "tape, adopted": (adopted, tape_step),
        "tape, its own": (given, tape_step),
        "wrapper": (wrapped, optimizer_step(wrapper)),
        "DGCMomentum": (paddle.compression, optimizer_step(paddle)),
    }


@case
def beside_momentum_they_are_refused_before_anything_is_exchanged():
    for name, (compression, step) in ways().items():
        shared, own = variables()
        text = m.assert_raises(lambda: step(compression, shared, own), "local variables", kinds=(ConfigError,))  # noqa: B023
        assert ("DGCMomentum" in text) == (name == "DGCMomentum"), text
        assert compression.stats.steps == 0, name
        assert compression.residual_norm == 0, name
        assert not np.asarray(own).any()
        assert not np.asarray(shared).any()


@case
def beside_a_decay_of_the_compressor_local_and_sparse_gradients_are_refused():
    for others in ("local variables", "sparse gradients"):
        for graph in (False, True):
            shared, own = variables()
            table = tf.Variable(tf.zeros([10, 4]))
            compression = dgc.Compression.dgc(momentum=0, weight_decay=0.1)

            def step(local=others == "local variables", shared=shared, own=own, table=table, compression=compression):
                with tf.GradientTape() as tape:
                    other = tf.reduce_sum(own) if local else tf.reduce_sum(tf.gather(table, [1, 2]))
                    loss = tf.reduce_sum(shared) + other
                tape = dgc.DistributedGradientTape(tape, compression=compression)
                if local:
                    tape.register_local_source(own)
                first, _ = tape.gradient(loss, [shared, own if local else table])
                shared.assign_sub(first)

            words = "weight_decay=0.1 of the compressor would not act on", others
            m.assert_raises(tf.function(step) if graph else step, *words)
            assert not np.asarray(shared).any()
            assert compression.stats.steps == 0


@case
def beside_momentum_one_rank_alone_is_an_error_on_all():
    """Only rank 1 has a local variable."""
    for eager in (True, False):
        shared, own = variables()
        compression = dgc.Compression.dgc(momentum=0.9)

        def step(compression=compression, shared=shared, own=own):
            if hvd.rank() == 1:
                return gradients_beside_local([shared], own, compression)
            return m.reduced(lambda: tf.reduce_sum(shared), [shared], compression)

        m.assert_raises(step if eager else tf.function(step), "local variables", "momentum=0")
        assert compression.stats.steps == 0


@case
def alone_beside_momentum_they_are_refused_too():
    """All variables are local: nothing is exchanged, and nobody would apply the momentum that was taken."""
    own = variables()[1]
    inner = keras.optimizers.SGD(1.0, momentum=0.9)
    optimizer = dgck.DistributedOptimizer(inner, compression=dgc.Compression.dgc())
    optimizer.register_local_var(own)
    m.assert_raises(lambda: optimizer.apply_gradients([(tf.ones([3]), own)]), "momentum=0", kinds=(ConfigError,))
    paddle = dgck.DGCMomentum(1.0, 0.9, 0)
    paddle.register_local_var(own)
    m.assert_raises(lambda: paddle.apply_gradients([(tf.ones([3]), own)]), "DGCMomentum", kinds=(ConfigError,))
    assert not np.asarray(own).any()


@case
def alone_they_are_scaled_like_horovods():
    for compression in (dgc.Compression.dgc(momentum=0), None):
        own = variables()[1]
        (gradient,) = gradients_beside_local([], own, compression)
        np.testing.assert_allclose(np.asarray(gradient), 1.0 / hvd.size())


# -- behind Horovod's own classes ----------------------------------------------------------------------------------


def stock_tape(compression, inner, steps=4, graph=False):
    """Values of both variables after training with Horovod's tape; ``compression`` makes the compressor for one."""
    shared, own = variables()
    given = compression(shared)

    def step():
        gradients = gradients_beside_local([shared], own, given, hvd)
        inner.apply_gradients(zip(gradients, [shared, own], strict=True))

    run = tf.function(step) if graph else step
    for _ in range(steps):
        run()
    return [np.asarray(v) for v in (shared, own)]


def compressor_of(inner, **options):
    return lambda shared: dgc.Compression.dgc([shared], optimizer=inner, **options)


@case
def horovods_tape_with_local_sources_equals_dense_or_is_refused():
    def sgd():
        return keras.optimizers.SGD(0.1, momentum=0.9)

    dense = stock_tape(lambda _: hvd.Compression.none, sgd())
    for graph in (False, True):
        inner = sgd()
        left = stock_tape(compressor_of(inner, momentum=0.0, **m.SPARSITY_0), inner, graph=graph)
        m.assert_close(left, dense, 1e-5)
        inner = sgd()
        m.assert_raises(
            lambda: stock_tape(compressor_of(inner, **m.SPARSITY_0), inner, graph=graph),  # noqa: B023
            "local variables",
            "momentum=0",
        )


@case
def a_momentum_that_is_assigned_later_is_refused_behind_horovods_tape():
    shared, own = variables()
    inner = keras.optimizers.SGD(0.1)
    compression = dgc.Compression.dgc([shared], optimizer=inner, rampup_begin_step=99)

    @tf.function
    def step():
        return gradients_beside_local([shared], own, compression, hvd)

    step()
    inner.momentum = 0.9
    m.assert_raises(step, "local variables", "momentum=0")


@case("legacy")
def horovods_optimizer_with_local_variables_is_refused_beside_momentum():
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

        m.assert_raises(lambda: [step() for _ in range(passes)], "momentum=0")  # noqa: B023


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
