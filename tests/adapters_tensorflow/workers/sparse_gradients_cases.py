"""Sparse gradients and Horovod's local variables: what is refused, and what is sent dense."""

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck

keras = m.keras


def variables():
    """A variable whose gradient is exchanged, and a local one."""
    return tf.Variable(tf.zeros([64, 2])), tf.Variable(tf.zeros([3]))


# -- sparse gradients -------------------------------------------------------------------------------------------------


@case
def behind_horovods_tape_they_are_refused_before_anything_is_sent():
    table, shared = tf.Variable(tf.zeros([64, 4]), name="table"), tf.Variable(tf.zeros([64, 2]))
    compression = dgc.Compression.dgc([shared, table], momentum=0, min_numel=64)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(shared) + tf.reduce_sum(tf.gather(table, [1]))
        return hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [shared, table])

    m.assert_raises(step, "use those of dgc.tensorflow")
    assert compression.stats.steps == 0


SENT = {  # the compressor's options, and the tape's
    "excluded": ({"exclude": "tab*"}, {}),
    "small": ({"min_numel": 1000}, {}),
    "as_dense": ({"min_numel": 64}, {"sparse_as_dense": True}),
    "compressed": ({"min_numel": 64}, {}),
}


@case(graph=(False, True), sent=SENT)
def they_are_averaged_and_compressing_them_warns_once_of_the_memory(graph, sent):
    wanted = np.zeros([64, 4])
    for rank in range(hvd.size()):
        wanted[[1, rank + 2]] += 1.0 / hvd.size()
    given, options = SENT[sent]
    table = tf.Variable(tf.zeros([64, 4]), name="table")
    compression = dgc.Compression.dgc(momentum=0.0, sparsity=0.0, values="float32", **given)
    shared = tf.Variable(tf.zeros([64, 2]))

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(shared) + tf.reduce_sum(tf.gather(table, [1, hvd.rank() + 2]))
        tape = dgc.DistributedGradientTape(tape, compression=compression, **options)
        return tape.gradient(loss, [shared, table])[1]

    with m.warned("sparse gradients") as told:
        for _ in range(3):
            np.testing.assert_allclose(np.asarray((tf.function(step) if graph else step)()), wanted)
    assert len(told) == (sent == "compressed" and hvd.rank() == 0), told
    assert all("'table'" in text and "takes 0.0 MiB" in text for text in told), told


@case
def a_model_with_an_embedding_trains_under_the_lines_of_the_readme():
    model = keras.Sequential(
        [keras.layers.Embedding(5000, 8), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(4)]
    )
    model.build((None, 6))
    optimizer = dgck.DistributedOptimizer(keras.optimizers.AdamW(1e-2), compression=dgc.Compression.dgc(steps=30))
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    labels = np.random.default_rng(hvd.rank()).integers(0, 4, 240)
    words = labels[:, None] * 1000 + np.arange(6)
    with m.warned("takes 0.5 MiB") as told:
        history = model.fit(words, labels, batch_size=8, verbose=0, callbacks=[m.ROOT(0)])
    assert history.history["loss"][0] < np.log(4)
    assert len(told) == (m.LEGACY and hvd.rank() == 0)  # step-ahead's updates are dense anyway
    assert optimizer.compression.stats.steps == 30
    m.assert_replicas(m.values(model))


@case(graph=(False, True))
def without_a_compressor_they_travel_horovods_way(graph):
    """Horovod has no kernel for bfloat16, which would come to light behind the exchange of the others."""
    table = tf.Variable(tf.zeros([10, 4], tf.bfloat16))
    optimizer = dgck.DistributedOptimizer(keras.optimizers.SGD(1.0))
    slices = tf.IndexedSlices(tf.ones([1, 4], tf.bfloat16), tf.constant([hvd.rank()]), tf.constant([10, 4]))

    def one():
        optimizer.apply_gradients([(slices, table)])

    (tf.function(one) if graph else one)()
    found = np.asarray(table, np.float32)
    np.testing.assert_array_equal(found[: hvd.size()], -1.0 / hvd.size())
    assert not found[hvd.size() :].any()


# -- behind Horovod's own classes ----------------------------------------------------------------------------------


@case(graph=(False, True))
def horovods_tape_with_local_sources_is_refused(graph):
    shared, own = variables()
    compression = dgc.Compression.dgc([shared], momentum=0)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(shared) + tf.reduce_sum(own)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        tape.register_local_source(own)
        return tape.gradient(loss, [shared, own])

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
