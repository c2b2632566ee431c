"""What is done before a compressor knows its model, what remains when binding fails, and what binding refuses."""

import copy
import gc
import weakref

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck
from dgc.errors import LayoutError

keras = m.keras


@case
def a_binding_that_failed_leaves_nothing():
    wrong, model = m.make_model(width=32 + 8 * hvd.rank()), m.make_model()
    for built in (False, True):
        inner = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
        compression = dgc.Compression.dgc(optimizer=inner, sparsity=0.9)
        if built:
            inner.build(m.raw(model.trainable_variables))
        for _ in range(2):
            m.assert_raises(lambda c=compression: m.tape_step(wrong, c), "variables differ between ranks")
            assert not compression.is_bound
            assert compression.engine is None
            assert inner.momentum == 0.9
            assert inner.nesterov is True
            assert inner.get_config()["momentum"] == 0.9
        if built:
            # Dense training goes on as if there had been no compressor.
            inner.apply_gradients([(tf.zeros_like(v), v) for v in m.raw(model.trainable_variables)])
            continue
        m.assert_replicas([np.asarray(g) for g in m.tape_step(model, compression)])
        assert inner.momentum == 0
        assert set(compression.engine.adoption.hyper.momentum) == {0.9}


def in_a_graph():
    model, inner = m.make_model(), keras.optimizers.SGD(0.05, momentum=0.9)
    compression = dgc.Compression.dgc(optimizer=inner, **m.SPARSE)
    step = m.stepper(model, inner, compression)
    for i in range(2):
        step(i)
    return compression


def in_fit(**options):
    compression = dgc.Compression.dgc(**m.SPARSE)
    m.fit(m.compile_model(compression, **options), 2)
    return compression


def traces_of(compression):
    engine = compression.engine
    u = engine.exchange.state.buckets[0].u
    return [weakref.ref(x) for x in (compression, engine, engine.exchange, u)]


@case
def models_in_a_loop_leave_nothing_behind():
    for train in (in_a_graph, in_fit, lambda: in_fit(learning_rate=0.05, backward_passes_per_step=2)):
        keras.backend.clear_session()
        left = [alive for _ in range(3) for alive in traces_of(train())]
        for _ in range(3):
            gc.collect()
        assert not [a() for a in left if a() is not None]


@case
def closing_gives_the_memory_back():
    # Horovod keeps what was given to its own classes for as long as the process lives.
    model, inner = m.make_model(), keras.optimizers.SGD(0.05, momentum=0.9)
    variables = m.raw(model.trainable_variables)
    compression = dgc.Compression.dgc(variables, optimizer=inner, **m.SPARSE)
    m.tape_step(model, compression, library=hvd, groups=1)
    u = traces_of(compression)[-1]
    compression.close()
    gc.collect()
    assert u() is None
    assert compression.stats.steps == 1
    m.assert_raises(compression.state_dict, "was closed", "before close()", kinds=(LayoutError,))


def go_on_dense(model, inner):
    step = m.stepper(model, inner, None, hvd, graph=False)
    for i in range(5):
        step(i)
    return m.values(model)


@case
def an_optimizer_whose_compressor_was_closed_trains_dense_with_its_momentum():
    for in_fit in (False, True):
        model, inner = m.make_model(), keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)
        compression = dgc.Compression.dgc(optimizer=inner, **m.SPARSE)
        if in_fit:
            m.fit(m.compiled(inner, model, compression=compression, run_eagerly=True), 2)
        else:
            m.stepper(model, inner, compression, graph=False)(0)
        other = m.make_model()
        other.set_weights(model.get_weights())
        compression.close()
        config = inner.get_config()
        assert config.get("inner", config)["momentum"] == inner.momentum == 0.9
        wanted = go_on_dense(other, keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True))
        if in_fit and m.LEGACY:  # it is the distributed one itself
            continue
        m.assert_equal(go_on_dense(model, inner), wanted)
        m.assert_raises(lambda: m.tape_step(model, compression), "exchanged twice" if in_fit else "after close()")  # noqa: B023


@case("keras3")
def an_adam_whose_compressor_was_closed_has_its_beta_1():
    model, inner = m.make_model(), keras.optimizers.Adam(0.01)
    compression = dgc.Compression.dgc(optimizer=inner, **m.SPARSE)
    m.stepper(model, inner, compression, graph=False)(0)
    assert float(inner.beta_1) == 0.0, "the compressor has the moment"
    compression.close()
    assert inner.beta_1 == 0.9


@case
def a_graph_that_outlives_its_model_says_so():
    held = {}

    def make():
        v = tf.Variable(tf.ones([20, 4]))

        @tf.function
        def step(gradient):
            compression = dgc.Compression.dgc(momentum=0.0, **m.SPARSE)  # nothing else refers to it

            class Tape(tf.GradientTape):
                def gradient(self, *_, **__):
                    return [gradient]

            return dgc.DistributedGradientTape(Tape(), compression=compression).gradient(None, [v])[0]

        held["v"], held["step"] = v, step.get_concrete_function(tf.TensorSpec([20, 4]))

    make()
    gc.collect()
    held["step"](tf.ones([20, 4]))  # the variable holds it
    held["v"]._dgc_compressor = None
    gc.collect()
    m.assert_raises(lambda: held["step"](tf.ones([20, 4])), "the compressor that this graph was built with is gone")


@case
def stand_ins_are_counted():
    sent = {}
    for library in (dgc, hvd):
        model = m.make_model()
        variables = m.raw(model.trainable_variables)
        compression = dgc.Compression.dgc(variables, momentum=0.0, sparsity=0.9)
        m.tape_step(model, compression, library=library, **({"groups": 1} if library is hvd else {}))
        sent[library] = compression.stats.last.bytes_sent
        compression.close()
    assert sent[hvd] == sent[dgc] + 4 * len(variables)


@case
def arguments_of_the_wrapper():
    def refused(text, **options):
        compression = dgck.Compression.dgc()
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        arguments = {"compression": compression, **options}
        m.assert_raises(lambda: dgck.DistributedOptimizer(inner, **arguments), text, kinds=(dgc.ConfigError,))
        assert inner.momentum == 0.9

    for factor in (0.0, -1.0, "2"):
        refused("gradient_predivide_factor", gradient_predivide_factor=factor)
    refused("gradient_predivide_factor", gradient_predivide_factor=2.0, op=hvd.Sum)
    refused("Adasum", op=hvd.Adasum)


@case
def a_model_is_copied_without_its_compressor():
    """As scripts do that keep averaged weights; a compressor itself cannot be copied once it is bound."""
    model, options = m.make_model(), {"momentum": 0.9, "sparsity": 0.9}
    compression = dgc.Compression.dgc(exclude=["bias"], **options)
    for step in range(2):
        m.tape_step(model, compression, step)
    for copied in (copy.deepcopy(model), keras.models.clone_model(model)):
        copied.set_weights(model.get_weights())
        m.tape_step(model, compression, 2)
        other = dgc.Compression.dgc(**options)
        m.assert_replicas([np.asarray(g) for g in m.tape_step(copied, other)])
        other.close()
    m.assert_raises(lambda: copy.deepcopy([compression]), "load_state_dict", kinds=(TypeError,))
    assert not copy.deepcopy(dgc.Compression.dgc(**options)).is_bound


@case
def a_sparsity_that_seems_to_be_a_mistake_is_told_on_rank_0():
    for options, text in ({"sparsity": 0.002}, "give sparsity=0.998"), ({}, "neither steps= nor sparsity="):
        with m.warned(text) as texts:
            m.tape_step(m.make_model(), dgc.Compression.dgc(momentum=0.0, **options))
        assert len(texts) == (hvd.rank() == 0), texts
