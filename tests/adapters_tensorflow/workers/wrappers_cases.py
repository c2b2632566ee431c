"""What Horovod's wrappers offer beside the compressor: accumulation, loading; and what ours refuse."""

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck
from dgc.errors import ConfigError, DGCError

keras = m.keras


# -- names of collectives ------------------------------------------------------------------------------------------


def embedding_model(seed=1):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Embedding(30, 8), keras.layers.Flatten(), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((5,), dtype="int32"), *layers])


def one_model_more_on_rank_1(make=m.make_model):
    """Keras numbers layers as they are made, so the model that is returned has other names there."""
    if hvd.rank() == 1:
        make(seed=3)
    return make()


@case
def a_rank_with_one_more_model_trains_a_dense_wrapper():
    for options in ({}, {"run_eagerly": True}, m.TWO_PASSES):
        model = m.compile_model(None, model=one_model_more_on_rank_1(), learning_rate=0.05, **options)
        m.fit(model, 4)
        m.assert_replicas(m.values(model))


@case(eager=(False, True), compressed=(False, True))
def a_rank_with_one_more_model_trains_sparse_gradients(eager, compressed):
    model, inner = one_model_more_on_rank_1(embedding_model), keras.optimizers.SGD(0.05)
    compression = dgc.Compression.dgc(momentum=0.0, **m.SPARSE) if compressed else None
    optimizer = dgck.DistributedOptimizer(inner, compression=compression, sparse_as_dense=compressed)
    model.compile(optimizer=optimizer, loss=m.loss_function, run_eagerly=eager)
    generator = np.random.default_rng(hvd.rank())
    x, y = generator.integers(0, 30, (32, 5)), generator.standard_normal((32, 3)).astype("f")
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    m.assert_replicas(m.values(model))


@case
def two_dense_wrappers_in_one_graph_do_not_share_names():
    """A GAN's two models in one traced step."""
    first, second = m.make_model(1), one_model_more_on_rank_1(lambda seed=2: m.make_model(seed))
    optimizers = [dgck.DistributedOptimizer(keras.optimizers.SGD(0.05)) for _ in range(2)]
    for optimizer, model in zip(optimizers, (first, second), strict=True):
        optimizer.build(m.raw(model.trainable_variables))

    @tf.function
    def step(x, y):
        for optimizer, model in zip(optimizers, (first, second), strict=True):
            gradients = m.own_gradients(model, x, y)
            optimizer.apply_gradients(list(zip(gradients, model.trainable_variables, strict=True)))

    for i in range(3):
        step(*map(tf.constant, m.batch(i)))
    for model in (first, second):
        m.assert_replicas(m.values(model))


# -- without a compressor ------------------------------------------------------------------------------------------


@case
def a_dense_wrapper_takes_bfloat16_and_a_predivide_factor():
    v = tf.Variable(tf.zeros([4], tf.bfloat16))
    optimizer = dgck.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply_gradients([(tf.fill([4], tf.cast(hvd.rank() + 1.0, tf.bfloat16)), v)])
    np.testing.assert_array_equal(np.asarray(v, np.float32), -np.mean(np.arange(hvd.size()) + 1.0))
    for factor in (1.0, 4.0):
        w = tf.Variable(tf.zeros([4]))
        optimizer = dgck.DistributedOptimizer(keras.optimizers.SGD(1.0), gradient_predivide_factor=factor)
        optimizer.apply_gradients([(tf.fill([4], hvd.rank() + 1.0), w)])
        np.testing.assert_allclose(np.asarray(w), -np.mean(np.arange(hvd.size()) + 1.0), rtol=1e-6)
    m.assert_raises(
        lambda: dgck.DistributedOptimizer(keras.optimizers.SGD(1.0), gradient_predivide_factor=0.0),
        "gradient_predivide_factor",
        kinds=(ConfigError,),
    )


# -- loading -------------------------------------------------------------------------------------------------------


@case(wrapped=(False, True))
def load_model_makes_a_dense_model_compressed(wrapped):
    """One that Keras' optimizer has trained, and one that our wrapper has trained without a compressor."""
    model = m.compiled(keras.optimizers.SGD(m.schedule(), momentum=0.9), wrapped=wrapped)
    m.fit(model, 12, rank=0)
    compression = dgc.Compression.dgc(**m.SPARSITY_0)
    loaded = m.reloaded(model, dgck.load_model, compression=compression)
    assert loaded.optimizer.compression is compression
    m.fit(model, 6, 12, rank=0)
    m.fit(loaded, 6, 12, rank=0)
    assert compression.stats.steps == 6
    m.assert_close(m.values(loaded), m.values(model), 1e-5)


@case
def load_model_of_a_compressed_model_takes_no_other_compressor():
    compression = dgc.Compression.dgc(**m.SPARSITY_0)
    model = m.compiled(keras.optimizers.SGD(0.05), compression=compression, run_eagerly=True)
    m.fit(model, 1)
    assert m.reloaded(model, dgck.load_model).optimizer.compression.config.sparsity == compression.config.sparsity
    again = {"compression": dgc.Compression.dgc()}
    m.assert_raises(lambda: m.reloaded(model, dgck.load_model, **again), "leave compression out")


class TellsOfItself(keras.optimizers.SGD):
    """A user's own optimizer, with methods and attributes that Horovod's or ours have, too."""

    compression = "zip"

    def bind(self, variables):
        raise AssertionError("this is the script's own")


@case("keras3")
def load_model_knows_a_users_optimizer_from_one_of_ours():
    model = m.compiled(TellsOfItself(0.05, momentum=0.9), wrapped=False)
    known = {"custom_objects": {"TellsOfItself": TellsOfItself}}
    loaded = m.reloaded(model, dgck.load_model, compression=dgc.Compression.dgc(**m.SPARSE), **known)
    m.fit(loaded, 2)
    assert loaded.optimizer.compression.stats.steps == 2
    m.assert_replicas(m.values(loaded))


@case
def a_model_that_lacks_options_loads_and_asks_for_them_before_it_is_trained():
    for name, compression, arguments in (
        ("process_set", dgc.Compression.dgc(), {"process_set": m.alone()}),
        ("loss_scale", dgc.Compression.dgc(loss_scale=lambda: 1.0), {}),
    ):
        model = m.compile_model(compression, learning_rate=0.05, run_eagerly=True, **arguments)
        m.fit(model, 1, rank=0)
        again = m.reloaded(model)
        given = m.reloaded(model, dgck.load_model, compression=dgc.Compression.dgc())
        again.run_eagerly = given.run_eagerly = True
        text = m.assert_raises(lambda c=again: m.fit(c, 1), "which cannot be saved", "DistributedOptimizer(")
        assert f"saved with {name}," in text, text
        iterations = int(again.optimizer.iterations)
        assert iterations == 1
        # As the error says: the loaded optimizer is given its options again.
        m.compiled(again.optimizer, again, compression=dgc.Compression.dgc(), run_eagerly=True)
        for whole in (again, given):
            m.fit(whole, 1, first=1)
            m.assert_replicas(m.values(whole))
            assert int(whole.optimizer.iterations) == iterations + 1
            assert whole.optimizer.compression.stats.steps == 1
        m.assert_raises(lambda c=again: dgck.DistributedOptimizer(c.optimizer), "is distributed already")


class Refuses(keras.constraints.Constraint):
    """Raises in the first update, behind the exchange."""

    def __init__(self):
        self.called = False

    def __call__(self, weight):
        if not self.called:
            self.called = True
            raise ValueError("this update is refused")
        return weight


@case
def an_exception_in_the_update_leaves_momentum_and_beta_1_as_they_were():
    """They are the compressor's between two updates as well, so that none has to be put back."""
    for inner, name in (
        (keras.optimizers.SGD(0.05, momentum=0.9), "momentum"),
        (keras.optimizers.Adam(0.01), "beta_1"),
    ):
        model = keras.Sequential([keras.layers.Dense(3, kernel_constraint=Refuses())])
        model.build((None, 20))
        compression = dgc.Compression.dgc(error_feedback="classic", **m.SPARSE)
        m.compiled(inner, model, compression=compression, run_eagerly=True)
        m.assert_raises(lambda: m.fit(model, 1), "this update is refused")  # noqa: B023
        config = model.optimizer.get_config()
        assert (config["inner"] if m.LEGACY else config["inner_optimizer"]["config"])[name] == 0.9
        m.fit(model, 2, first=1)
        assert compression.stats.steps == 3
        m.assert_replicas(m.values(model))


# -- what is refused -----------------------------------------------------------------------------------------------


@case
def a_process_set_that_is_none():
    for wrong in (3, [0, 1]):
        for given in ({"process_set": wrong}, {"compression": dgc.Compression.dgc(process_set=wrong)}):
            m.assert_raises(
                lambda: dgck.DistributedOptimizer(keras.optimizers.SGD(1.0), **given),  # noqa: B023
                "process_set is",
                "hvd.ProcessSet",
                kinds=(ConfigError,),
            )


@case
def a_strategy_of_tensorflow():
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        v = tf.Variable(tf.zeros([64, 64]))
    m.assert_raises(
        lambda: dgc.Compression.dgc([v], momentum=0.0),
        "tf.distribute",
        "one process for each device",
        kinds=(DGCError,),
    )


@case
def callbacks_know_a_users_optimizer_from_one_of_ours():
    model = m.compiled(TellsOfItself(0.05), m.make_model(seed=1 + hvd.rank()), wrapped=False)
    for _ in range(2):
        m.fit(model, 1, rank=0, callbacks=[m.ROOT(0)])
    m.assert_replicas(m.values(model))
    m.assert_raises(
        lambda: m.fit(model, 1, callbacks=[dgck.callbacks.CompressionCheckpoint("never-written")]),
        "CompressionCheckpoint needs",
        kinds=(ConfigError,),
    )
