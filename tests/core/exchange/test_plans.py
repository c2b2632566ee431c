"""The laws that every way of exchanging a bucket keeps; each way is forced here, whatever it costs."""

import numpy as np
import pytest
from exchange_tools import gradients, make_exchange, on_ranks, run_step, same_results
from fake_device import fake_kernels, needs_compiler

from dgc.core.exchange import choice, owners
from dgc.core.exchange.dense_sum import DenseSum
from dgc.core.exchange.gather import Gather
from dgc.core.exchange.step import StepOptions
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.message import Flags
from dgc.errors import DGCError, LayoutError

RANKS = 3
SHAPES = {"a": (60, 70), "b": (64, 64), "small": (333,), "c": (40, 50), "bias": (20,)}
OPTIONS = {"sparsity": 0.9, "momentum": 0.0, "small": "int3", "bucket_bytes": 25_000}
WAYS = ("dense sum", "gathered", "owners")


@pytest.fixture
def way(request, monkeypatch):
    """The name of the only way that is chosen in a step with compression."""

    def forced(setting, encoder, dealt=None):
        if setting.density is None or request.param == "dense sum":
            return DenseSum(setting, encoder)
        return dealt if request.param == "owners" and dealt else Gather(setting, encoder)

    monkeypatch.setattr(choice, "cheapest", forced)
    monkeypatch.setattr(owners, "SUMS_PER_ENTRY", 2)  # so that sums wait at their owners
    return request.param


def on_plans(way, function, **options):
    def one_rank(exchange, rank):
        assert len(exchange.layout.buckets) > 1
        assert exchange.ways() == way
        return function(exchange, rank)

    return on_ranks(RANKS, one_rank, SHAPES, **{**OPTIONS, **options})


def unsent(exchange):
    """By name: what this rank holds of its own and as an owner."""
    parameters = exchange.state.to_dict()["parameters"].items()
    return {name: sum(e[key].astype(float) for key in ("v", "error", "w") if key in e) for name, e in parameters}


def step(exchange, rank, number):
    return run_step(exchange, gradients(number, rank, SHAPES))[1]


def conserving(way, **options):
    """Train, and check that what was given was sent or is held; return the ranks' exchanges."""

    def train(exchange, rank):
        sent = [step(exchange, rank, number) for number in range(3)]
        return sent, unsent(exchange), exchange

    rows = on_plans(way, train, **options)
    for i, name in enumerate(SHAPES):
        given = sum(gradients(s, r, SHAPES)[i].astype(float) for s in range(3) for r in range(RANKS))
        share = 1 if options.get("op") == "sum" else RANKS
        sent = share * sum(results[i].astype(float) for results in rows[0][0])
        np.testing.assert_allclose(sent + sum(held[name] for _, held, _ in rows), given, atol=2e-5)
        assert sent.any()
    return [exchange for *_, exchange in rows]


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize(
    "options",
    [
        *({"values": values} for values in ("float32", "float16", "int8", "int4", "int2")),
        *({"small": small} for small in ("float16", "int8", "int2")),
        {"op": "sum"},
        {"algorithm": "topk"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "make_kernels", [ReferenceKernels, NumbaKernels, pytest.param(fake_kernels, marks=needs_compiler)]
)
def test_what_was_given_was_sent_or_is_held(way, options, make_kernels):
    for exchange in conserving(way, kernels=make_kernels(), **options):
        assert all(state.w.any() for state in exchange.state.buckets) is (way == "owners")


@pytest.mark.parametrize("way", ["owners"], indirect=True)
def test_entries_that_do_not_fit_a_part_are_held(way, monkeypatch):
    monkeypatch.setattr(owners, "PART_MARGIN", -4.0)
    for exchange in conserving(way):
        plans = [bucket.plan for bucket in exchange._buckets]
        room, selected = RANKS * sum(plan.capacity for plan in plans), sum(sum(plan.encoder.ks) for plan in plans)
        assert exchange.stats.last.entries_sent <= room < selected


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_replicas_are_equal_and_a_loaded_run_goes_on_bit_for_bit(way):
    def train(exchange, rank):
        first = [step(exchange, rank, number) for number in range(3)]
        other = make_exchange(exchange.transport, SHAPES, **{**OPTIONS, "momentum": 0.9, "values": "int2"})
        exchange.average()
        other.load_state_dict(exchange.state_dict())
        straight, resumed = ([step(each, rank, number) for number in range(3, 6)] for each in (exchange, other))
        same_results(straight, resumed)
        other.close()
        return first + straight

    rows = on_plans(way, train, momentum=0.9, values="int2")
    for other in rows[1:]:
        same_results(rows[0], other)


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("spoiled", ["a", "small"])
@pytest.mark.filterwarnings("ignore:NaN, infinity")
def test_a_dropped_step_changes_what_is_held_by_its_gradients_only(way, spoiled):
    def train(exchange, rank):
        step(exchange, rank, 0)
        before, given = unsent(exchange), gradients(1, rank, SHAPES)
        if rank == 1:
            given[list(SHAPES).index(spoiled)][5] = np.nan
        assert run_step(exchange, given)[0]
        after = unsent(exchange)
        for (name, old), g in zip(before.items(), given, strict=True):
            added = np.nan_to_num(g) if len(SHAPES[name]) > 1 else 0  # small tensors forget such a step
            np.testing.assert_allclose(after[name], old + added, atol=1e-6)

    on_plans(way, train)


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("make_kernels", [NumbaKernels, pytest.param(fake_kernels, marks=needs_compiler)])
def test_a_step_in_which_every_rank_has_joined_is_undone(way, make_kernels):
    def train(exchange, rank):
        for number in range(2):
            step(exchange, rank, number)
        before, zeros = exchange.state_dict(), [np.zeros_like(g) for g in gradients(0, rank, SHAPES)]
        run_step(exchange, zeros, options=StepOptions(joins=Flags.JOINED))
        assert set(exchange.joined) == set(range(RANKS))
        np.testing.assert_equal(exchange.state_dict(), before)

    on_plans(way, train, momentum=0.9, values="int8", kernels=make_kernels())


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_an_error_of_one_rank_is_an_error_on_all_and_the_next_run_is_a_fresh_one(way):
    def train(exchange, rank):
        step(exchange, rank, 0)
        with pytest.raises(DGCError, match="rank 1 failed in step 1: mine"):
            exchange.fail(LayoutError("mine")) if rank == 1 else step(exchange, rank, 1)
        exchange.reset()
        again = step(exchange, rank, 0)
        fresh = make_exchange(exchange.transport, SHAPES, **OPTIONS)
        same_results([again], [step(fresh, rank, 0)])
        fresh.close()

    on_plans(way, train)


def test_all_ways_have_the_same_results_if_nothing_is_rounded_and_all_sums_are_sent(monkeypatch):
    monkeypatch.setattr(owners, "PART_MARGIN", 100.0)
    monkeypatch.setattr(owners, "SUMS_PER_ENTRY", 1000)
    cheapest, found = choice.cheapest, {}
    for name in WAYS:

        def forced(setting, encoder, dealt=None, name=name):
            plans = {"dense sum": DenseSum(setting, encoder), "gathered": Gather(setting, encoder), "owners": dealt}
            return plans[name] if setting.density is not None else cheapest(setting, encoder)

        monkeypatch.setattr(choice, "cheapest", forced)
        options = {"momentum": 0.9, "values": "float32", "small": "float32"}
        rows = on_plans(name, lambda exchange, rank: [step(exchange, rank, s) for s in range(4)], **options)
        found[name] = rows[0]
    for name in WAYS[1:]:
        for a, b in zip(found[name], found["dense sum"], strict=True):
            for x, y in zip(a, b, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
