"""On real ranks: DGCMomentum against Paddle's algorithm in NumPy, against Keras' SGD, and resumed."""

import itertools
import tempfile
from pathlib import Path

import horovod.tensorflow as hvd
import models as m
import momentum_models as mm
import numpy as np
import tensorflow as tf
from momentum_models import SHAPES, make, make_variables, oracle_of, oracle_train, train, train_in_graph
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck
from dgc.core.state_file import load_state, save_state

keras = m.keras
L1Decay, L2Decay = dgc.L1Decay, dgc.L2Decay


@case
def equals_paddle_from_before_the_rampup_to_its_end():
    kinds = itertools.product((False, True), (None, L1Decay(1e-3), L2Decay(1e-2)))
    for number, (nesterov, regularization) in enumerate(kinds):
        clip = (None, 1.5)[number % 2]  # every two options meet
        own = make_variables()
        optimizer = make(
            rampup_begin_step=3,
            rampup_step=4,
            sparsity=[0.75, 0.99],
            use_nesterov=nesterov,
            regularization=regularization,
            local_grad_clip_norm=clip,
            num_trainers=hvd.size() if clip else None,
        )
        l1 = [1e-3 if isinstance(regularization, L1Decay) else 0.0] * len(own)
        l2 = [1e-2 if isinstance(regularization, L2Decay) else 0.0] * len(own)
        oracle = oracle_of(
            own, begin=3, rampup_step=4, sparsity=(0.75, 0.99), nesterov=nesterov, clip=clip, l1=l1, l2=l2
        )
        steps = train_in_graph if number in (2, 3, 4) else train
        for start in range(0, 9, 3):
            steps(optimizer, own, 3, start)
            oracle_train(oracle, own, 3, start)
            mm.assert_close(own, oracle)
        m.assert_replicas(mm.arrays(own))
        parameters = optimizer.compression.state_dict(own=True)["parameters"]
        for i in range(2):
            np.testing.assert_allclose(parameters[f"w{i}"]["v"], oracle.v[hvd.rank()][i], atol=2e-5)


@case
def sparse_gradients_become_dense_momentum():
    def step(optimizer, table):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [1, 2]))
        gradients = tape.gradient(loss, [table])
        assert isinstance(gradients[0], tf.IndexedSlices)
        optimizer.apply_gradients(zip(gradients, [table], strict=True))

    table = tf.Variable(tf.zeros((1000, 32)), name="table")
    optimizer = make(exclude="tab*")
    step(optimizer, table)
    step(optimizer, table)
    np.testing.assert_allclose(table.numpy()[1], -0.1 * (1 + 1.9), rtol=1e-6)
    assert np.flatnonzero(table.numpy().any(axis=1)).tolist() == [1, 2]
    optimizer.compression.close()
    optimizer, table = make(sparsity=[0.0]), tf.Variable(tf.zeros((1000, 32)), name="table")
    step(optimizer, table)
    step(optimizer, table)
    np.testing.assert_allclose(table.numpy()[1], -0.1 * (1 + 1.9), rtol=0.01)
    assert np.flatnonzero(table.numpy().any(axis=1)).tolist() == [1, 2]


@case(in_graph=(False, True))
def variables_with_arguments_of_their_own_have_an_optimizer_of_their_own(in_graph):
    """Paddle's ParamAttr(learning_rate=..., regularizer=...)."""
    ramp, owned = {"rampup_begin_step": 2, "sparsity": [0.9]}, [make_variables(SHAPES[:2]), make_variables(SHAPES[2:])]
    optimizers = [
        make(learning_rate=0.1, regularization=L1Decay(0.01), **ramp),
        make(learning_rate=0.02, regularization=L2Decay(0.05), **ramp),
    ]
    oracles = [
        oracle_of(owned[0], begin=2, sparsity=(0.9,), l1=[0.01] * 2),
        oracle_of(owned[1], begin=2, sparsity=(0.9,), l2=[0.05] * 3, lr=0.02),
    ]

    def step(gradients):
        for optimizer, own, given in zip(optimizers, owned, gradients, strict=True):
            optimizer.apply_gradients(zip(given, own, strict=True))

    for optimizer, own in zip(optimizers, owned, strict=True):
        optimizer.build(own)
    run = tf.function(step) if in_graph else step
    for number in range(5):
        run([[tf.constant(mm.gradient(v.shape, number, i)) for i, v in enumerate(own)] for own in owned])
        for oracle, own in zip(oracles, owned, strict=True):
            oracle_train(oracle, own, 1, number)
    for own, oracle in zip(owned, oracles, strict=True):
        mm.assert_close(own, oracle)


@case(nesterov=(False, True), first=(2, 5))
def resume_continues_bit_for_bit(nesterov, first):
    path = Path(tempfile.mkdtemp()) / "state.npz"
    options = dict(
        rampup_begin_step=3, sparsity=[0.9, 0.99], rampup_step=4, use_nesterov=nesterov, regularization=L2Decay(0.1)
    )
    own = make_variables()
    optimizer = make(**options)
    assert optimizer.state_dict()["parameters"] == {}
    train(optimizer, own, first)
    saved = mm.arrays(own)
    optimizer.learning_rate = 0.04
    optimizer.compression.average(optimizer)
    save_state(path, optimizer.state_dict())
    state = load_state(path)
    assert state["step"] == state["iterations"] == first
    train(optimizer, own, 5, first)
    # Before its first step, and in the middle of another run.
    for begun in (0, 3):
        again = make_variables()
        resumed = make(**options)
        train(resumed, again, begun, 50)
        resumed.set_dict(state)
        for v, value in zip(again, saved, strict=True):
            v.assign(value)
        train(resumed, again, 5, first)
        m.assert_equal(again, own)
        assert int(resumed.iterations) == first + 5
        resumed.compression.close()


@case
def minimize_is_a_whole_iteration():
    weight = tf.Variable(np.random.default_rng(0).standard_normal((128, 128)).astype("f") / 12, name="weight")
    optimizer = make(learning_rate=0.01, momentum=0.5, sparsity=[0.9])
    optimizer.build([weight])
    x = tf.ones((2, 128)) * (1 + hvd.rank())

    def loss():
        return tf.reduce_mean((x @ weight) ** 2)

    first = float(loss())
    for _ in range(40):
        optimizer.minimize(loss, [weight])
    assert float(loss()) < 0.2 * first, (first, float(loss()))
    with tf.GradientTape() as tape:
        value = loss()
    optimizer.minimize(value, [weight], tape=tape)
    assert optimizer.compression.stats.steps == 41
    m.assert_replicas([weight.numpy()])


@case
def fit_compiles_saves_and_continues():
    options = dict(rampup_begin_step=4, rampup_step=4, sparsity=[0.9, 0.99], regularization=L2Decay(1e-3))
    optimizer = make(learning_rate=m.schedule(), **options)
    model = m.compiled(optimizer, m.make_model(width=128), wrapped=False, run_eagerly=False)
    m.fit(model, 6)
    m.assert_replicas(m.values(model))
    assert optimizer.compression.stats.last.sparse_elements == 128 * 128
    optimizer.compression.average(optimizer)
    again, state = m.reloaded(model), optimizer.state_dict()
    m.fit(model, 6, first=6)
    assert again.optimizer.get_config() == optimizer.get_config()
    again.optimizer.load_state_dict(state)
    m.fit(again, 6, first=6)
    m.assert_equal(m.values(again), m.values(model))
    assert again.optimizer.compression.stats.steps == 6


@case
def argument_errors():
    given = dict(learning_rate=0.1, momentum=0.9, rampup_begin_step=0)
    bad = [
        (AssertionError, "num_trainers is 9, but", {**given, "num_trainers": 9}),
        (ValueError, "mean the same", {**given, "lr": 0.1}),
        (TypeError, "unknown option 'nonsense'", {**given, "nonsense": 1}),
    ]
    for error, text, options in bad:
        m.assert_raises(lambda: dgc.DGCMomentum(**options), text, kinds=(error,))  # noqa: B023
    optimizer = make(lr=0.1, learning_rate=None)
    refused = {"kinds": (dgc.ConfigError,)}
    m.assert_raises(lambda: dgck.DistributedOptimizer(optimizer), "distributed already", **refused)
    with tf.GradientTape():
        m.assert_raises(lambda: make().minimize(tf.zeros(()), []), "without its tape", **refused)


@case
def ranks_that_disagree_all_get_an_error():
    rank = hvd.rank()

    def first_step(shapes=None, **options):
        train(make(**options), make_variables(shapes), 1)

    kinds = (L1Decay, L2Decay)
    for error, text, given in (
        (dgc.ConfigError, "sparsity", {"sparsity": [0.9 if rank else 0.8]}),
        (dgc.LayoutError, "w0", {"shapes": [(300, 300 + rank)]}),
        (dgc.ConfigError, "L1Decay", {"regularization": kinds[min(rank, 1)](0.1)}),
        (dgc.ConfigError, "momentum", {"momentum": 0.9 - 0.1 * rank}),
        (dgc.ConfigError, "learning_rate", {"learning_rate": 0.1 + rank}),
    ):
        m.assert_raises(lambda: first_step(**given), text, kinds=(error,))  # noqa: B023
