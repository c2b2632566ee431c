"""Custom training loops on real ranks: tape and optimizer, eager and in a tf.function, wrapper and stock Horovod."""

import functools
import textwrap

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from documented import shown
from worker_tools import case

import dgc.tensorflow as dgc


@case
def op_sum_adds_the_ranks():
    for library in (dgc, hvd):
        model = m.make_model()
        compression = dgc.Compression.dgc(m.raw(model.trainable_variables), momentum=0.0, op=hvd.Sum, **m.SPARSITY_0)
        summed = m.tape_step(model, compression, library=library, op=hvd.Sum)
        for i, (a, b) in enumerate(zip(summed, m.own_gradients(model, *m.batch(0)), strict=True)):
            wanted = hvd.allreduce(b, op=hvd.Sum, name=f"sum{library.__name__}{i}")
            np.testing.assert_allclose(a, wanted, rtol=1e-6, atol=1e-7)


PRECISION = {"float16": 2e-3, "bfloat16": 2e-2, "float64": 1e-12}


@case(dtype=PRECISION, graph=(False, True))
def float16_bfloat16_and_float64_variables(dtype, graph):
    variable = tf.Variable(tf.cast(tf.random.stateless_normal([40, 30], [1, 2]), dtype))
    compression = dgc.Compression.dgc(momentum=0.0, **m.SPARSITY_0)
    mine = tf.cast(tf.random.stateless_normal([40, 30], [3, hvd.rank()]), dtype)

    def one_step():
        return m.reduced(lambda: tf.reduce_sum(variable * mine), variable, compression)

    result = (tf.function(one_step) if graph else one_step)()
    assert result.dtype == dtype
    wanted = hvd.allreduce(tf.cast(mine, tf.float64), op=hvd.Average, name="wanted")
    tolerance = PRECISION[dtype]
    np.testing.assert_allclose(tf.cast(result, tf.float64), wanted, rtol=tolerance, atol=tolerance)


@case
def a_non_finite_gradient_refuses_the_step_everywhere():
    variable = tf.Variable(tf.ones([40, 30]))
    other = tf.Variable(tf.ones([7]))
    compression = dgc.Compression.dgc(momentum=0.9, **m.SPARSE)
    for step in range(4):
        bad = step == 2 and hvd.rank() == 1
        factor = tf.constant(np.inf if bad else 1.0, tf.float32)

        def loss(factor=factor):
            return tf.reduce_sum(variable * factor) + tf.reduce_sum(other)

        gradients = m.reduced(loss, [variable, other], compression)
        finite = all(np.isfinite(g).all() for g in gradients)
        assert finite is (step != 2), (step, finite)
    assert compression.stats.refused_steps == 1
    assert compression.describe()["step"] == 3


@case
def what_changes_variables_later_in_a_graph_waits_for_the_exchange():
    """A decay of weights depends on no gradient. Ranks that had decayed them already seemed to train other models."""
    for library in (dgc, hvd):
        variable, seen = tf.Variable(tf.ones([40, 30])), []
        compression = dgc.Compression.dgc([variable], momentum=0.0, **m.SPARSE)
        compression.on_step(lambda _, seen=seen, variable=variable: seen.append(float(variable.numpy()[0, 0])))

        @tf.function
        def step(x, library=library, variable=variable, compression=compression):
            for _ in range(20):  # the gradient takes longer than the assignment
                x = x @ x
            (gradient,) = m.reduced(lambda: tf.reduce_sum(variable @ x), [variable], compression, library)
            variable.assign_sub(tf.ones_like(variable))
            return gradient

        for _ in range(3):
            step(tf.eye(30))
        assert seen == [1.0, 0.0, -1.0], seen


WAYS = {"stock": ("stock", True), "eager": ("wrapper", False), "graph": ("wrapper", True)}


@case(way=WAYS)
def after_an_error_training_goes_on_from_a_reset_or_a_loaded_state(way):
    def prepare():
        way_of, graph = WAYS[way]
        model, inner = m.make_model(), m.keras.optimizers.SGD(0.05, momentum=0.9)
        compression, library = m.compressor(way_of, model, inner, **m.SPARSE)
        one = m.stepper(model, inner, compression, library, graph)

        def train(first, last):
            for step in range(first, last):
                one(step)

        train(0, 3)
        compression.average(inner)
        return model, inner, compression, train

    straight, _, _, train = prepare()
    train(3, 8)
    for recovery in ("reset", "state"):
        model, inner, compression, train = prepare()
        state = compression.state_dict()
        inner.learning_rate = 0.05 / (1 + hvd.rank())
        m.assert_raises(functools.partial(train, 3, 4), "disagree in step 3 about the learning rate")
        inner.learning_rate = 0.05
        if recovery == "reset":
            compression.reset()
        else:
            compression.load_state_dict(state)
        train(3, 8)
        m.assert_replicas(m.values(model))
        same = [np.array_equal(a, b) for a, b in zip(m.values(model), m.values(straight), strict=True)]
        assert all(same) == (recovery == "state"), recovery


@case
def the_documented_loops():
    """docs/tensorflow.md, word for word: a plain loop, one that steps ahead, and one with a loss scale."""
    plain, ahead, scaled = shown("tensorflow.md", "Custom loops")
    x, y = tf.ones([4, 20]) * (1 + hvd.rank()), tf.constant([0, 1, 2, 3])
    for texts in ((plain, ahead), (plain,)):
        names = {"total_steps": 20}
        m.keras.utils.set_random_seed(1)
        for text in texts:
            exec(text, names)
        assert hasattr(names["optimizer"], "compression") == (ahead in texts)
        losses = [float(names["step"](x, y)) for _ in range(20)]
        assert losses[-1] < losses[0], losses
        m.assert_replicas(m.values(names["model"]))
    setup, loop = scaled.split("...\n")
    exec(setup, names)
    names.update(x=x, y=y)
    for _ in range(5):
        exec(textwrap.dedent(loop), names)
    m.assert_replicas(m.values(names["model"]))
