"""Compressed or dense: the same on all ranks, exactly dense training where dense, and kept by a saved state."""

import itertools
import logging
import threading

import numpy as np
import pytest
from exchange_tools import gradient, parameters, run_step
from fakes import FakeEngine

from dgc.adapter.paddle import PaddleOptions
from dgc.adapter.speed import choice
from dgc.adapter.speed.network import Line, Network, measure_network
from dgc.adapter.speed.work import Cost
from dgc.adapter.states import own_state
from dgc.core.compressors import compressor_names, make_config
from dgc.core.exchange.exchange import Exchange
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.layout import make_layout
from dgc.errors import ConfigError, LayoutError
from dgc.transport.local import run_ranks

BASE = {"momentum": 0.9, "sparsity": 0.9, "min_numel": 64, "values": "float32"}
OPTIONS = {
    "plain": {},
    "nesterov": {"nesterov": True},
    "no momentum": {"momentum": 0.0},
    "summed": {"op": "sum"},
    "sparsity 0": {"sparsity": 0.0},
    "later": {"rampup_begin_step": 3},
    "clipped": {"local_grad_clip_norm": 0.5, "clip_scope": "global"},
    "no feedback": {"error_feedback": False},
}
FAST = Network(Line(((256, 1e-9), (1024, 2e-9))), Line(((256, 1e-9), (1024, 2e-9))))
SLOW = Network(Line(((256, 1e-3), (1024, 1e-2))), Line(((256, 1e-3), (1024, 1e-2))))
WORK = Cost(sparse=2e-9, dense=1e-9)


@pytest.fixture
def predicted(monkeypatch):
    """Sets what all ranks measure."""

    def set_to(network, work=WORK):
        monkeypatch.setattr(choice, "measure_network", lambda transport: network)
        monkeypatch.setattr(choice, "measure_cost", lambda *_: work)

    return set_to


def on_ranks(function, ranks=2, **options):
    """``function(engine)`` on all ranks; also returns what it does."""

    def one_rank(transport):
        engine = FakeEngine(transport, make_config({**BASE, **options}))
        try:
            return function(engine)
        finally:
            engine.close()

    return run_ranks(ranks, one_rank)


def kinds(engine):
    return [row["exchange"] for row in engine.describe()["exchange"]["buckets"]]


def steps(engine, first, last):
    return np.array([engine.step(number) for number in range(first, last)])


# -- what is chosen ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("network", "expected"), [(FAST, "dense"), (SLOW, "sparse")])
def test_the_cheaper_one_is_chosen_and_told(predicted, caplog, network, expected):
    predicted(network)
    with caplog.at_level(logging.WARNING, "dgc"):
        found = on_ranks(lambda engine: engine.describe()["exchange"], exchange="auto")
    for described in found:
        assert (described["option"], described["reason"]) == ("auto", None)
        for row in described["buckets"]:
            assert row["exchange"] == expected == ("dense" if row["dense_ms"] < row["sparse_ms"] else "sparse")
    assert len([r for r in caplog.records if "nothing is compressed" in r.message]) == (expected == "dense")


def test_ranks_that_measure_wildly_different_things_choose_alike(monkeypatch):
    """For real: clocks that run at rates a million apart, and work that differs from thread to thread."""
    counter, ranks = itertools.count(1), 3

    def clock_of(transport):
        ticks = itertools.count()
        return lambda: 1e-9 * 10 ** (3 * transport.rank) * next(ticks) ** 2

    monkeypatch.setattr(choice, "measure_network", lambda t: measure_network(t, clock_of(t)))
    monkeypatch.setattr(choice, "measure_cost", lambda *_: Cost(1e-9 * next(counter) ** 5, 1e-9 * next(counter) ** 5))
    found = on_ranks(lambda engine: engine.describe()["exchange"]["buckets"], ranks, exchange="auto")
    assert found[0] == found[1] == found[2]


def test_work_that_one_rank_cannot_measure_is_an_error_on_all(monkeypatch):
    first = threading.Lock()

    def measure(*_):
        if first.acquire(blocking=False):
            raise LayoutError("no memory")
        return WORK

    monkeypatch.setattr(choice, "measure_cost", measure)

    def one_rank(transport):
        with pytest.raises(LayoutError, match="no memory"):
            FakeEngine(transport, make_config({**BASE, "exchange": "auto"}))

    run_ranks(3, one_rank)


def test_each_bucket_has_its_own_choice(predicted):
    """A sum costs five milliseconds, a message next to nothing: the small bucket is sent dense, within it."""
    predicted(Network(Line(((256, 0.0), (1 << 20, 1e-6))), Line(((256, 5e-3), (1024, 5e-3)))))

    def one_rank(transport):
        config = make_config({**BASE, "exchange": "auto", "bucket_bytes": 8192})
        engine = FakeEngine(transport, config, (("a",),), numel=2048)
        large = FakeEngine(transport, config, (("a",),), numel=1 << 20)
        return kinds(engine) + kinds(large)

    assert run_ranks(2, one_rank) == [["dense", "sparse"]] * 2


@pytest.mark.parametrize(
    ("ranks", "options", "reason"),
    [(1, {}, "one rank"), (2, {"local_grad_clip_norm": 1.0}, "clipped")],
)
def test_without_a_prediction_it_compresses_and_says_why(predicted, ranks, options, reason):
    predicted(FAST)
    for engine in on_ranks(lambda e: (kinds(e), e.describe()["exchange"]["reason"]), ranks, exchange="auto", **options):
        assert set(engine[0]) == {"sparse"}
        assert reason in engine[1]


def test_on_a_device_nothing_is_predicted(predicted):
    predicted(FAST)

    class Device:
        on_device = True

    def place(engine):
        engine._choice = choice.Choice(engine._config)
        engine._agree_on_options()
        placed = engine._place(engine.layout.parameters, Device())
        return placed.sparse_numel, engine.describe()["exchange"]["reason"]

    assert on_ranks(place, exchange="auto") == [(4096, "the gradients are on a GPU")] * 2


def test_the_option_is_checked():
    with pytest.raises(ConfigError, match="exchange is 'fast'; allowed: 'sparse', 'dense', 'auto'"):
        make_config({"exchange": "fast"})
    with pytest.raises(ConfigError, match="clip_scope='global'"):
        make_config({"exchange": "dense", "local_grad_clip_norm": 1.0})


@pytest.mark.parametrize("exchange", ["dense", "auto"])
@pytest.mark.parametrize("name", compressor_names())
def test_every_compressor_has_the_option(predicted, name, exchange):
    predicted(FAST)

    def one_rank(transport):
        engine = FakeEngine(transport, make_config({"min_numel": 64, "exchange": exchange}, algorithm=name))
        plain = FakeEngine(transport, make_config({"momentum": 0.0, "exclude": "*"}))
        assert set(kinds(engine)) == {"dense"}
        np.testing.assert_array_equal(steps(engine, 0, 3), steps(plain, 0, 3))

    run_ranks(2, one_rank)


def test_paddles_optimizer_has_no_such_option():
    with pytest.raises(TypeError, match="DGCMomentum got an unknown option 'exchange'; besides Paddle's it takes"):
        PaddleOptions(0.1, 0.9, 0, codecs={"exchange": "auto"})


# -- what dense means --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_dense_bucket_is_dense_training(options):
    """That of tensors which the options exclude: bit for bit, in all options."""
    ours = on_ranks(lambda e: (steps(e, 0, 6), e.residual_norm(), kinds(e)), **options, exchange="dense")
    theirs = on_ranks(lambda e: steps(e, 0, 6), **options, exclude="*")
    for (found, residual, kind), expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(found, expected)
        assert residual == 0
        assert set(kind) == {"dense"}


@pytest.mark.parametrize("op", ["average", "sum"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_compressed_run_goes_on_from_a_dense_one_as_after_a_dense_warm_up(op, nesterov):
    """Nothing is lost or sent twice: the same as with as many dense steps before the ramp-up."""
    options = {"op": op, "nesterov": nesterov}
    whole = on_ranks(lambda e: steps(e, 0, 9), ranks=3, rampup_begin_step=4, **options)

    def saved(engine):
        return steps(engine, 0, 4), engine.state_dict()

    dense = on_ranks(saved, ranks=3, exchange="dense", **options)

    def resumed(engine):
        engine.load_state_dict(dense[engine.transport.rank][1])
        return steps(engine, 4, 9), kinds(engine)

    for rank, (found, kind) in enumerate(on_ranks(resumed, ranks=3, exchange="sparse", **options)):
        together = np.concatenate([dense[rank][0], found])
        np.testing.assert_allclose(together, whole[rank], rtol=0, atol=1e-5 if op == "sum" else 0)
        assert set(kind) == {"sparse"}


# -- what a resumed run does -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(FAST, SLOW), (SLOW, FAST)])
def test_a_resumed_run_goes_on_as_its_state_says(predicted, first, second):
    """Whatever is predicted on its network; bit for bit."""
    predicted(first)
    whole = on_ranks(lambda e: steps(e, 0, 6), exchange="auto")
    saved = on_ranks(lambda e: (e.step(0), e.step(1), e.state_dict(), kinds(e))[2:], exchange="auto")
    predicted(second)

    def resumed(engine):
        before = kinds(engine)
        engine.require_loadable(saved[engine.transport.rank][0])
        engine.load_state_dict(saved[engine.transport.rank][0])
        return before, kinds(engine), steps(engine, 2, 6)

    for rank, (before, after, found) in enumerate(on_ranks(resumed, exchange="auto")):
        assert before != after == saved[rank][1]
        np.testing.assert_array_equal(found, whole[rank][2:])


def test_residuals_are_not_dropped_by_a_dense_run(predicted):
    states = on_ranks(lambda e: (e.step(), e.state_dict())[1])

    def one_rank(engine):
        with pytest.raises(LayoutError, match=r"dense here but was sparsified.*exchange"):
            engine.load_state_dict(states[engine.transport.rank])

    on_ranks(one_rank, exchange="dense")


def test_other_options_are_still_refused():
    states = on_ranks(lambda e: (e.step(), e.state_dict())[1], exclude="a")

    def one_rank(engine):
        with pytest.raises(LayoutError, match="use the same min_numel"):
            engine.load_state_dict(states[engine.transport.rank])

    on_ranks(one_rank)


@pytest.mark.parametrize("op", ["average", "sum"])
def test_a_dense_state_goes_to_any_number_of_ranks(op):
    states = on_ranks(lambda e: (steps(e, 0, 3), e.state_dict())[1], ranks=3, exchange="dense", op=op)

    def one_rank(engine):
        own = own_state(states, engine.transport, 0, op=op)
        engine.load_state_dict(own)
        assert own["step"] == 3
        return [engine.state_dict()["parameters"][name]["u"] for name in "ab"]

    for momentum in on_ranks(one_rank, ranks=2, exchange="auto", op=op):
        for name, found in zip("ab", momentum, strict=True):
            np.testing.assert_array_equal(found, states[0]["parameters"][name]["u"])


def test_buckets_that_are_cut_otherwise_keep_residuals(predicted):
    """One bucket of a tensor with residuals and one without: both are compressed, and nothing is dropped."""
    predicted(SLOW)
    states = on_ranks(lambda e: (steps(e, 0, 3), e.state_dict())[1], exchange="auto")
    for state in states:
        entry = state["parameters"]["b"]
        del entry["v"], entry["threshold"]
        entry["exchange"] = "dense"

    def one_rank(transport):
        engine = FakeEngine(transport, make_config({**BASE, "exchange": "auto"}), (("a", "b"),))
        state = states[transport.rank]
        engine.load_state_dict(state)
        assert kinds(engine) == ["sparse"]
        exchange = engine._exchanges[0]
        np.testing.assert_array_equal(exchange.state.residual(0), state["parameters"]["a"]["v"])
        assert not exchange.state.residual(1).any()
        np.testing.assert_array_equal(exchange.state.momentum_buffer(1), state["parameters"]["b"]["u"])

    run_ranks(2, one_rank)


def test_small_tensors_of_a_dense_bucket_travel_exactly_and_what_is_owed_to_them_keeps_it_compressed():
    """A layer with its bias: as if both were excluded; a state with a codec's error is not loaded dense."""
    shapes = {"layer": (64, 64), "bias": (64,)}

    def one_rank(transport):
        found = {}
        for way, options in {"coded": {}, "dense": {}, "excluded": {"exclude": "*"}}.items():
            config = make_config({**BASE, **options})
            layout = make_layout(parameters(shapes), config)
            placed = layout.with_dense([0]) if way == "dense" else layout
            exchange = Exchange(placed, config, transport, ReferenceKernels())
            found[way] = [
                run_step(exchange, [gradient(s, transport.rank, i, n) for i, n in enumerate((4096, 64))])[1]
                for s in range(4)
            ]
            found[f"state of {way}"] = exchange.state_dict()["parameters"]
            exchange.close()
        for ours, theirs in zip(found["dense"], found["excluded"], strict=True):
            np.testing.assert_array_equal(np.concatenate(ours), np.concatenate(theirs))
        assert all(set(entry) == {"u", "exchange"} for entry in found["state of dense"].values())
        assert "error" in found["state of coded"]["bias"]
        followed = choice.Choice(make_config({**BASE, "exchange": "auto"}))
        followed._dense["layer"] = True
        owed = {"bias": found["state of coded"]["bias"]}
        layout = make_layout(parameters(shapes), make_config(BASE))
        sparsified, small = followed.kinds(layout.with_dense([0]), found["state of coded"])
        assert sparsified["layer"]
        assert small == {"bias"}
        assert followed.follow(owed)
        assert followed.placed(layout) == layout
        assert not followed.follow(owed)

    run_ranks(2, one_rank)
