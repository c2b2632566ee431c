"""What must fail, on all ranks, with a message that says what to do. Each case ends with all ranks alive."""

import functools
import itertools

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvdk
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck

keras = m.keras


@case
def arguments_that_are_wrong_on_one_rank_alone():
    def bind(**wrong):
        model = m.make_model()
        given = {"parameters": m.raw(model.trainable_variables), "optimizer": keras.optimizers.SGD(0.1, momentum=0.9)}
        dgc.Compression.dgc(**{**given, **(wrong if hvd.rank() == 1 else {})})

    for part, wrong in {
        "steps is -1": {"steps": -1},
        "op is 'max'": {"op": "max"},
        "also needs optimizer=": {"optimizer": None},
        "optimizer is 3": {"optimizer": 3},
        "nothing to compress": {"parameters": []},
        "momentum would be applied twice": {"momentum": 0.9},
    }.items():
        m.assert_raises(lambda: bind(**wrong), part)  # noqa: B023
    m.tape_step(m.make_model(), dgc.Compression.dgc(momentum=0.0))


@case
def a_tape_without_an_optimizer():
    m.assert_raises(lambda: m.tape_step(m.make_model(), dgc.Compression.dgc()), "Compression.dgc(optimizer=optimizer)")


@case
def a_second_compressor_for_an_optimizer_whose_momentum_or_beta_1_is_taken():
    taken = [(keras.optimizers.SGD(0.1, momentum=0.9), "momentum")]
    if not m.LEGACY:
        taken.append((keras.optimizers.Adam(0.1), "beta_1"))
    for inner, name in taken:
        dgc.Compression.dgc(optimizer=inner)
        for options in ({}, {"momentum": 0}):
            m.assert_raises(lambda: dgc.Compression.dgc(optimizer=inner, **options), "outside the training step")  # noqa: B023
        setattr(inner, name, 0.5)
        adoption = dgc.Compression.dgc(optimizer=inner).adoption
        assert (adoption.momentum if name == "momentum" else adoption.moment.beta1) == 0.5


@case
def what_a_tape_cannot_take_over():
    model = m.make_model()
    for inner in (keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)):
        scaled = keras.mixed_precision.LossScaleOptimizer(inner)
        compression = dgc.Compression.dgc(optimizer=scaled)
        m.assert_raises(lambda: m.tape_step(model, compression), "loss_scale=optimizer")  # noqa: B023
    scaled = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    m.tape_step(model, dgc.Compression.dgc(optimizer=scaled, loss_scale=scaled))


@case
def one_compressor_for_two_models():
    for library in (dgc, hvd):
        first, second = m.make_model(1), m.make_model(2)
        variables = m.raw(first.trainable_variables)
        compression = dgc.Compression.dgc(variables, momentum=0.0)
        m.tape_step(first, compression, library=library)
        m.assert_raises(lambda: m.tape_step(second, compression, library=library), "one compressor for each model")  # noqa: B023
    m.compile_model(compression := dgc.Compression.dgc())
    m.assert_raises(lambda: m.compile_model(compression), "one compressor for each model")


@case
def a_larger_model_with_the_former_one_s_optimizer():
    for others_too in (True, False):
        former = m.compile_model(dgc.Compression.dgc(**m.SPARSITY_0))
        optimizer = former.optimizer
        m.fit(former, 3, callbacks=[m.ROOT(0)])
        larger = m.make_model(2)
        larger.add(keras.layers.Dense(3))
        larger.build((None, 20))
        model = larger if others_too or hvd.rank() == 0 else former
        model.compile(optimizer, loss=m.loss_function)
        callbacks = [m.ROOT(0)] if others_too else []
        advice = "build one compressor for each model and optimizer"
        m.assert_raises(lambda: m.fit(model, 2, callbacks=callbacks), advice)  # noqa: B023


@case
def optimizers_that_do_not_fit_gradients_of_which_most_is_zero():
    C = dgc.Compression
    strom = C.strom(threshold=0.1)
    classic = functools.partial(C.dgc, error_feedback="classic")
    for compression in (classic(), classic(sparsity=0.99), strom):
        optimizer = keras.optimizers.Adafactor(0.01)
        text = m.assert_raises(lambda: dgck.DistributedOptimizer(optimizer, compression=compression), "epsilon_1=1e-12")  # noqa: B023
        assert "Adafactor" in text
        m.assert_raises(lambda: C.dgc(optimizer=optimizer), "epsilon_1=1e-12")  # noqa: B023
    sound = [({}, {"sparsity": 0.0}), ({"epsilon_1": 1e-12}, {"sparsity": 0.99})]
    for own, options in sound:
        compression = classic(min_numel=64, **options)
        model = m.compiled(keras.optimizers.Adafactor(0.01, **own), compression=compression)
        losses = [m.fit(model, 4)["loss"][-1] for _ in range(3)]
        assert all(np.isfinite(v).all() for v in m.values(model))
        assert losses[-1] < losses[0], losses
    for compression, said in ((classic(), 1), (C.dgc(), int(m.LEGACY)), (C.onebit(), 0)):
        with m.warned("a tenth of dense training's learning rate") as texts:
            dgck.DistributedOptimizer(keras.optimizers.Lion(), compression=compression)
        assert len(texts) == said
    dgck.DistributedOptimizer(keras.optimizers.Adafactor(0.01), compression=C.onebit())


@case
def what_is_no_compressor():
    optimizer = keras.optimizers.SGD(0.1)
    message = "which is no compressor; call one: compression=Compression."
    uncalled = dgc.DGCCompressor, dgc.Compression.dgc, dgc.Compression.topk
    for wrong in uncalled:  # Horovod's own classes look at it in the first step
        m.assert_raises(lambda: m.tape_step(m.make_model(), wrong, library=hvd), message)  # noqa: B023
    for wrong in (*uncalled, "dgc", dgc.Compression, 3):
        m.assert_raises(lambda: m.tape_step(m.make_model(), wrong), message)  # noqa: B023
        m.assert_raises(lambda: dgck.DistributedOptimizer(optimizer, compression=wrong), message)  # noqa: B023
    m.assert_raises(lambda: dgc.Compression.dgc(optimizer="sgd"), "optimizer is 'sgd'")
    m.assert_raises(lambda: dgck.DGCMomentum(0.1, 0.9, 0, values="float8"), "values is 'float8'", "'float16'")


@case
def a_compressor_in_the_place_of_another_argument():
    compression = dgc.Compression.dgc(momentum=0.0)
    m.assert_raises(lambda: dgc.DistributedOptimizer(keras.optimizers.SGD(0.1), compression), "name is", "compression=")
    m.assert_raises(lambda: dgc.DistributedGradientTape(tf.GradientTape(), compression), "compression=...")
    m.assert_raises(lambda: dgc.Compression.dgc(0.99), "the variables are 0.99", "sparsity=0.999")
    for wrong in ("sgd", tf.compat.v1.train.GradientDescentOptimizer(0.1)):
        m.assert_raises(lambda: dgck.DistributedOptimizer(wrong), "is no Keras optimizer")  # noqa: B023


@case
def sessions_of_tensorflow_1():
    def train():
        with tf.Graph().as_default():
            dgc.Compression.dgc([tf.compat.v1.get_variable("w", [40, 40])], momentum=0)

    m.assert_raises(train, "sessions are not supported")


@case
def xla():
    model = m.make_model()
    compression = dgc.Compression.dgc(momentum=0.0)
    compiled = tf.function(lambda: m.tape_step(model, compression)[0], jit_compile=True)
    m.assert_raises(compiled, "jit_compile=False")
    model = m.compile_model(dgc.Compression.dgc(), jit_compile=True)
    m.assert_raises(lambda: m.fit(model, 2), "jit_compile=False")
    m.assert_raises(lambda: m.fit(model, 2, callbacks=[m.ROOT(0)]), "jit_compile=False")


@case(graph=(False, True), only_one_rank=(False, True))
def a_variable_that_gets_a_gradient_later(graph, only_one_rank):
    variables = [tf.Variable(tf.ones([40, 40])), tf.Variable(tf.ones([40, 40]))]
    compression = dgc.Compression.dgc(momentum=0.0, **m.SPARSE)

    def step(both):
        used = variables if both else variables[:1]
        return m.reduced(lambda: tf.add_n([tf.reduce_sum(v**2) for v in used]), variables, compression)

    run = tf.function(step) if graph else step
    run(False)
    run(False)
    both = hvd.rank() == 0 if only_one_rank else True
    m.assert_raises(lambda: run(both), "was 'none' in the first step and is 'dense' now")


@case
def ops_that_do_not_fit():
    model = m.make_model()
    variables = m.raw(model.trainable_variables)
    m.assert_raises(lambda: m.tape_step(model, dgc.Compression.dgc(momentum=0.0), op=hvd.Adasum), "Adasum")
    told = dgc.Compression.dgc(momentum=0.0, op=hvd.Sum)
    m.assert_raises(lambda: m.tape_step(model, told, op=hvd.Average), "pass the same to both")
    stock = dgc.Compression.dgc(variables, momentum=0.0)
    m.assert_raises(lambda: m.tape_step(model, stock, library=hvd, op=hvd.Sum), "op=hvd.Sum")


@case
def no_backward_passes():
    for passes, compression in itertools.product((0, "2", True), (None, dgc.Compression.fp16, dgc.Compression.dgc())):
        arguments = {"compression": compression, "backward_passes_per_step": passes}
        m.assert_raises(
            lambda: dgck.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), **arguments),  # noqa: B023
            f"backward_passes_per_step is {passes!r}",
            kinds=(dgc.ConfigError,),
        )


@case
def groups_in_the_wrapper_and_unknown_options():
    model = m.make_model()
    m.assert_raises(lambda: m.tape_step(model, dgc.Compression.dgc(momentum=0.0), groups=1), "bucket_bytes")
    m.assert_raises(lambda: dgc.Compression.dgc(sparcity=0.9), "unknown option", "sparsity", kinds=(TypeError,))
    m.assert_raises(lambda: dgc.Compression.dgc(sparsity=1.0), "[0, 1)")
    m.assert_raises(lambda: dgc.Compression.dgc(m.raw(model.trainable_variables)), "optimizer=")


@case
def horovods_own_classes_without_one_group():
    for groups, graph in itertools.product((None, 2), (False, True)):
        model = m.make_model()
        stock = dgc.Compression.dgc(m.raw(model.trainable_variables), momentum=0.0)
        before = m.values(model)
        step = m.stepper(model, keras.optimizers.SGD(0.1), stock, hvd, graph, groups=groups)
        m.assert_raises(lambda: step(0), "ConfigError", "pass groups=1")  # noqa: B023
        assert stock.stats.steps == 0
        m.assert_equal(m.values(model), before)
        stock.close()
    if m.LEGACY:
        model = m.compile_model({"sparsity": 0.9}, wrapper=False, groups=None)
        m.assert_raises(lambda: m.fit(model, 1), "ConfigError", "pass groups=1")


@case
def an_open_shape():
    variable = tf.Variable(tf.ones([40, 40]), shape=tf.TensorShape([None, 40]))
    compression = dgc.Compression.dgc(momentum=0.0)
    step = functools.partial(m.reduced, lambda: tf.reduce_sum(variable**2), [variable], compression)
    m.assert_raises(step, "needs a fixed one")


@case("keras3")
def horovods_keras_3_optimizer_diverges_and_is_refused():
    model = m.compile_model(dgc.Compression.none, wrapper=False)
    m.fit(model, 10)
    assert m.replicas_differ(m.values(model)), "Horovod averages under Keras 3 now: the refusal can go"
    root, text = m.ROOT(0), "does not average gradients under Keras 3"
    m.assert_raises(lambda: m.fit(model, 1, callbacks=[root]), text)
    m.assert_raises(lambda: m.compile_model({}, wrapper=False), text)  # also without the callback
    one = m.compile_model(dgc.Compression.none, wrapper=hvd.rank() == 1, run_eagerly=True)
    m.assert_raises(lambda: m.fit(one, 1, callbacks=[root]), text)


@case("legacy")
def optimizers_of_the_module_legacy():
    """Of ``tf_keras``, which Horovod trains dense: ours, Horovod's own with a compressor, and a tape's."""
    model, sgd = m.make_model(), keras.optimizers.legacy.SGD
    advice = "tf_keras.optimizers.legacy.SGD is not supported; use tf_keras.optimizers.SGD"
    scaled = keras.mixed_precision.LossScaleOptimizer(sgd(0.1))
    derived = type("Derived", (sgd,), {})(0.1)
    m.assert_raises(lambda: dgck.DistributedOptimizer(sgd(0.1)), advice)
    m.assert_raises(lambda: dgck.DistributedOptimizer(sgd(0.1), compression=dgc.Compression.dgc()), advice)
    for optimizer in (sgd(0.1, momentum=0.9), scaled, derived):
        m.assert_raises(lambda: dgc.Compression.dgc(optimizer=optimizer), advice)  # noqa: B023
    compression = dgc.Compression.dgc(model.trainable_variables, momentum=0.9)
    m.assert_raises(lambda: hvdk.DistributedOptimizer(sgd(0.1), compression=compression), advice)


@case("keras3", "legacy")
def what_exchanges_gradients_refuses_step_ahead():
    told = "keras.DistributedOptimizer of Keras 3"
    model, inner = m.make_model(), keras.optimizers.SGD(0.1)
    compression = dgc.Compression.dgc(error_feedback="step-ahead")
    for action in (
        lambda: dgc.Compression.dgc(m.raw(model.trainable_variables), optimizer=inner, error_feedback="step-ahead"),
        lambda: dgc.Compression.dgc(optimizer=inner, error_feedback="step-ahead"),
        lambda: dgc.DistributedGradientTape(tf.GradientTape(), compression=compression),
        *([lambda: dgck.DistributedOptimizer(inner, compression=compression)] if m.LEGACY else []),
    ):
        m.assert_raises(action, told, kinds=(dgc.errors.ConfigError,))
