"""What holds for every front end: equal to dense, replicas alike, the same entries, resumed bit for bit."""

import functools

import horovod.tensorflow as hvd
import models as m
from worker_tools import case

import dgc.tensorflow as dgc

keras = m.keras
STEPS = 14


def by_tape(options, optimizer, graph, way="wrapper"):
    """A custom loop at changing learning rates; without options, dense by Horovod's tape."""
    model, inner = m.make_model(), keras.optimizers.SGD(0.05, **m.OPTIMIZERS[optimizer])
    way = "dense" if options is None else way
    compression, library = m.compressor(way, model, inner, **(options or {}))
    one = m.stepper(model, inner, compression, library, graph)
    for step in range(STEPS):
        inner.learning_rate = m.rate(step)
        one(step)
    return m.values(model), compression


def by_fit(options, optimizer, **arguments):
    """Keras' ``fit()``, with dgc's optimizer or (``wrapper=False``, in legacy Keras) Horovod's own."""
    given = options if arguments.get("wrapper") is False else dgc.Compression.dgc(**options)
    model = m.compile_model(given, optimizer=optimizer, **arguments)
    m.fit(model, STEPS)
    return m.values(model), given if isinstance(given, dgc.DGCCompressor) else None


TAPES = {
    "tape": functools.partial(by_tape, graph=True),
    "eager tape": functools.partial(by_tape, graph=False),
    "Horovod's tape": functools.partial(by_tape, way="stock", graph=True),
    "Horovod's eager tape": functools.partial(by_tape, way="stock", graph=False),
}
FITS = {"fit": by_fit, "eager fit": functools.partial(by_fit, run_eagerly=True)}
if m.LEGACY:
    FITS["Horovod's fit"] = functools.partial(by_fit, wrapper=False)
FRONT_ENDS = {**TAPES, **FITS}
EQUAL = {"at sparsity 0": m.SPARSITY_0, "from the ramp-up on": {**m.SPARSITY_0, "rampup_begin_step": 9}}


@functools.cache
def dense(optimizer):
    """What Horovod alone trains, the oracle of all front ends."""
    return by_tape(None, optimizer, graph=False)[0]


def equal_to_dense(name, optimizer, kind):
    found, compression = FRONT_ENDS[name](EQUAL[kind], optimizer)
    m.assert_close(found, dense(optimizer), 1e-5)
    m.assert_replicas(found)
    assert compression is None or compression.stats.steps == STEPS


@case
def every_front_end_equals_dense_across_changes_of_the_learning_rate():
    for name in FRONT_ENDS:
        equal_to_dense(name, "momentum", "at sparsity 0")


@case
def nesterov_decay_and_no_momentum_equal_dense_too():
    for name in ("tape", "Horovod's tape", "fit"):
        equal_to_dense(name, "nesterov", "from the ramp-up on")
    for optimizer in ("plain", "decoupled decay"):
        for name in ("eager tape", "eager fit"):
            equal_to_dense(name, optimizer, "at sparsity 0")


@case
def replicas_stay_bit_identical_at_99_percent_and_all_tapes_select_the_same_entries():
    exact = None
    for name, make in FRONT_ENDS.items():
        found, compression = make({**m.SPARSE, "values": "float32", "small": "float32"}, "momentum")
        m.assert_replicas(found)
        if name in TAPES:
            exact = exact or found
            m.assert_close(found, exact, 1e-5)
        if compression is not None:
            assert compression.stats.total.density < 0.012
            assert compression.residual_norm > 0


@case
def a_state_saved_in_the_middle_continues_bit_for_bit():
    """``fit()`` has cases of its own, for what Keras saves."""
    for way in ("wrapper", "stock"):
        model, inner = m.make_model(), keras.optimizers.SGD(0.05, momentum=0.9)

        def steps(compression, library, first, last, inner=inner, model=model):
            one = m.stepper(model, inner, compression, library, graph=False)
            for step in range(first, last):
                inner.learning_rate = m.rate(step)
                one(step)

        first, library = m.compressor(way, model, inner, **m.SPARSE)
        steps(first, library, 0, 9)
        first.average(inner)
        saved, weights = first.state_dict(), m.values(model)
        steps(first, library, 9, 15)
        wanted = m.values(model)
        model.set_weights(weights)
        inner.momentum = 0.9
        second, _ = m.compressor(way, model, inner, **m.SPARSE)
        second.load_state_dict(saved)
        steps(second, library, 9, 15)
        m.assert_equal(m.values(model), wanted)


@case("4ranks")
def nodes_that_send_as_one_equal_dense_and_stay_alike():
    for name in ("tape", "fit"):
        options = {**m.SPARSITY_0, "hierarchical": 2}
        found, _ = FRONT_ENDS[name](options, "momentum")
        m.assert_close(found, dense("momentum"), 1e-5)
        found, compression = FRONT_ENDS[name]({**m.SPARSE, "hierarchical": 2}, "momentum")
        m.assert_replicas(found)
        assert compression.describe()["nodes"] == 2
    assert hvd.size() == 4
