"""Ranks that add up entries for each other: what they send, keep and refuse; ranks are threads."""

from types import SimpleNamespace

import numpy as np
import pytest
from exchange_tools import errors_of, gradients, make_exchange, on_ranks, parameters, run_step, same_results
from fake_device import fake_kernels, needs_compiler

from dgc.core.collectives import as_transport
from dgc.core.compressors import make_config
from dgc.core.compressors.base import SparseValues
from dgc.core.exchange import owners, sizes
from dgc.core.exchange.encoders import TopKEncoder
from dgc.core.exchange.owners import Owners
from dgc.core.exchange.sizes import Setting
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.layout import make_layout
from dgc.core.stripes import owners_of
from dgc.errors import DGCError, WireError
from dgc.transport.local import run_ranks

RANKS = 8
SHAPES = {"a": (300, 70), "b": (64, 64), "small": (333,), "c": (90, 50), "bias": (20,)}
OPTIONS = {"sparsity": 0.95, "momentum": 0.0, "small": "int3"}

WHEREVER = pytest.mark.parametrize(
    "make_kernels", [ReferenceKernels, NumbaKernels, pytest.param(fake_kernels, marks=needs_compiler)]
)


@pytest.fixture(autouse=True)
def few_sums(monkeypatch):
    """Let owners pay on 8 ranks and small tensors, as they do by default on more ranks and larger tensors."""
    monkeypatch.setattr(owners, "SUMS_PER_ENTRY", 2)
    monkeypatch.setattr(sizes, "COLLECTIVE_BYTES", 0)


def make(transport, **options):
    return make_exchange(transport, SHAPES, **{**OPTIONS, **options})


def on_owners(function, ranks=RANKS, **options):
    return on_ranks(ranks, function, SHAPES, **{**OPTIONS, **options})


def given(step, rank):
    return gradients(step, rank, SHAPES)


def residuals(exchange):
    """By name: what the rank has not sent of its own (v, or a small tensor's error), and w; in float64."""
    found = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        bucket, segment = exchange.layout.places[i]
        state = exchange.state.buckets[bucket]
        own, w = exchange.kernels.memory.to_host(exchange.state.residual(i)), np.zeros(np.prod(shape))
        values, places = state.owned(segment)
        w[places] = values
        found[name] = (own if own.size else exchange.state.error(i)).astype(float), w
    return found


def test_of_entries_that_do_not_fit_the_smallest_stay(monkeypatch):
    monkeypatch.setattr(owners, "PART_MARGIN", -4.0)
    config = make_config({"min_numel": 64, "values": "float32", "small": "float32"})
    (bucket,) = make_layout(parameters(SHAPES), config).buckets
    setting = Setting(bucket, config, 0.03, RANKS, rank=0)
    plan = Owners(setting, TopKEncoder(setting))
    plan.begin(SimpleNamespace(number=0, fingerprint=0))
    plan.prepare(SimpleNamespace(rank=0, size=RANKS), ReferenceKernels())
    values = np.random.default_rng(0).standard_normal(800).astype(np.float32)
    sent = plan.write_parts(SparseValues(np.arange(800), values))
    assert 0 < plan.capacity < 100
    for rank in range(RANKS):
        mine = np.flatnonzero(owners_of(np.arange(800), RANKS) == rank)
        largest = mine[np.argsort(-np.abs(values[mine]))[: plan.capacity]]
        np.testing.assert_array_equal(sent.positions[owners_of(sent.positions, RANKS) == rank], np.sort(largest))


def test_all_kernels_have_the_same_results():
    def steps(exchange, rank):
        return [run_step(exchange, given(step, rank))[1] for step in range(4)], residuals(exchange)

    first, second = (on_owners(steps, kernels=kernels) for kernels in (ReferenceKernels(), NumbaKernels()))
    np.testing.assert_equal(first, second)


# -- refused and failed steps ------------------------------------------------------------------------------------------


def test_a_sum_that_overflows_on_its_owner_is_refused_on_all_ranks():
    def step(exchange, rank):
        own = given(0, rank)
        own[0][5] = 3e38
        refused, _ = run_step(exchange, own)
        v, w = residuals(exchange)["a"]
        return refused, w.any(), np.array_equal(v, own[0])

    assert on_owners(step) == [(True, False, True)] * RANKS


def test_an_error_in_the_preparation_of_one_rank_is_an_error_on_all(monkeypatch):
    prepare, failed = Owners.prepare, []

    def fail_once(self, transport, kernels):
        if transport.rank == 3 and not failed:
            failed.append(True)
            raise WireError("no memory is left")
        prepare(self, transport, kernels)

    monkeypatch.setattr(Owners, "prepare", fail_once)
    errors = errors_of(RANKS, lambda exchange, rank: run_step(exchange, given(0, rank)), SHAPES, **OPTIONS)
    assert all("no memory is left" in str(error) for error in errors)


def change_what_comes(transport, collective, change):
    """Call ``change`` with what the rank receives in a collective."""
    usual = getattr(transport, collective)

    def changed(message, out):
        usual(message, out)
        change(out)

    setattr(transport, collective, changed)


def damaged(collective, damaged_rank, change):
    """The results of each rank's step, or its error, where one rank receives something else than was sent."""

    def rank(transport):
        if transport.rank == damaged_rank:
            change_what_comes(transport, collective, change)
        exchange = make(transport)
        try:
            return [r.tobytes() for r in run_step(exchange, given(0, transport.rank))[1]]
        except DGCError as error:
            return error

    return run_ranks(RANKS, rank)


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (0, 0, "begins with"),
        (3, ord("P"), "begins with"),
        (7, 9, "claims"),
        (slice(8, None), 255, "elias_fano"),
    ],
    ids=str,
)
def test_a_damaged_part_is_an_error_on_all_ranks(place, value, text):
    def change(out):
        out[5, place] = value

    for error in damaged("alltoall", 3, change):
        assert isinstance(error, WireError)
        assert "rank 3 failed in step 0: part of rank 5 for bucket 0" in str(error)
        assert text in str(error)


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [(0, 0, "it starts with"), (31, 9, "count"), (slice(64, 200), 255, "elias_fano")],
    ids=str,
)
def test_damaged_sums_are_an_error_that_names_their_owner(place, value, text):
    def change(out):
        out[5, place] = value

    ended = damaged("allgather", 3, change)
    error = ended.pop(3)
    assert isinstance(error, WireError)
    assert "rank 5" in str(error)
    assert text in str(error)
    assert all(results == ended[0] for results in ended)


@pytest.mark.parametrize("seed", range(12))
def test_random_damage_of_a_part_never_ends_in_different_results(seed):
    """A damaged value cannot be seen; everything else is an error of all ranks."""

    def change(out):
        rng = np.random.default_rng(seed)
        row, at = rng.integers(RANKS), rng.integers(min(200, out.shape[1] - 8))
        out[row, at : at + 4] = rng.integers(0, 256, 4)

    ended = damaged("alltoall", 1, change)
    assert all(isinstance(e, DGCError) for e in ended) or all(e == ended[0] for e in ended)


def test_a_parameter_without_a_gradient_on_any_rank_keeps_its_w():
    def steps(exchange, rank):
        run_step(exchange, given(0, rank))
        before, results = residuals(exchange), []
        for i, g in enumerate(given(1, rank)):
            results.append(np.ones_like(g))
            exchange.submit(i, g * (i != 0), results[-1], absent=i == 0)
        exchange.finish()
        after = residuals(exchange)
        assert not results[0].any()
        assert not np.array_equal(before["b"][1], after["b"][1])
        return np.array_equal(before["a"], after["a"]) and before["a"][1].any()

    assert all(on_owners(steps))


# -- states ------------------------------------------------------------------------------------------------------------


def test_a_saved_state_holds_w_with_v_and_an_average_keeps_the_mean():
    def one_rank(exchange, rank):
        for step in range(4):
            run_step(exchange, given(step, rank))
        before, saved = residuals(exchange), exchange.state_dict()["parameters"]
        exchange.average()
        return before, saved, exchange.state_dict()["parameters"]

    rows = on_owners(one_rank)
    for name in ("a", "small"):
        assert any(before[name][1].any() for before, *_ in rows), "no sum waits at its owner"
    for name in SHAPES:
        key = "v" if "v" in rows[0][1][name] else "error"
        for before, saved, after in rows:
            np.testing.assert_allclose(saved[name][key], sum(before[name]), atol=1e-6)
            np.testing.assert_array_equal(after[name][key], rows[0][2][name][key])
        mean = sum(sum(before[name]) for before, *_ in rows) / RANKS
        np.testing.assert_allclose(rows[0][2][name][key], mean, atol=1e-6)


@WHEREVER
def test_a_step_without_owners_sends_w_as_the_ranks_own(make_kernels):
    """Where the next density makes a dense sum cheaper."""

    def steps(exchange, rank):
        run_step(exchange, given(0, rank))
        before = exchange.state.buckets[0].w.any()
        run_step(exchange, given(1, rank))
        rest = run_step(exchange, [np.zeros_like(g) for g in given(0, 0)])[1]
        return before, exchange.state.buckets[0].w.any(), rest

    for before, after, rest in on_owners(steps, sparsity=(0.95, 0.0), rampup_step=2, kernels=make_kernels()):
        assert before
        assert not after
        assert not any(r.any() for r in rest), "everything was sent in the step before"


# -- when --------------------------------------------------------------------------------------------------------------


def test_the_bytes_that_came_are_those_of_the_plan_and_of_the_statistics():
    def rank(transport):
        came = []
        for collective in ("alltoall", "allgather"):
            change_what_comes(transport, collective, lambda out: came.append(out.nbytes - out.shape[1]))
        exchange = make(transport, values="int2")
        run_step(exchange, given(0, transport.rank))
        exchange.close()
        plan, last = exchange._buckets[0].plan, exchange.stats.last
        assert sum(came) == last.bytes_received == (RANKS - 1) * (plan.part_bytes + plan.form.nbytes)
        assert plan.traffic == (2 * (RANKS - 1), sum(came), 2)
        assert last.bytes_sent == (RANKS - 1) * plan.part_bytes + plan.form.nbytes

    run_ranks(RANKS, rank)


@pytest.mark.parametrize(
    ("ranks", "options", "way"),
    [
        (2, {}, "gathered"),
        (RANKS, {}, "owners"),
        (RANKS, {"exchange": "gather"}, "gathered"),
        (RANKS, {"sparsity": (0.0, 0.95), "rampup_step": 2}, "owners"),
        (RANKS, {"sparsity": 0.0}, "dense sum"),
        (RANKS, {"bucket_bytes": 2000}, "gathered: 2, owners: 3"),
    ],
    ids=str,
)
def test_it_says_which_exchange_was_chosen(ranks, options, way):
    assert on_owners(lambda exchange, _: exchange.ways(), ranks, **options) == [way] * ranks


@pytest.mark.parametrize("options", [{"bucket_bytes": 2000}, {"exchange": "gather"}], ids=str)
def test_only_a_bucket_with_owners_holds_w(options):
    def rank(exchange, _):
        plans = [bucket.plans[1 - exchange.config.sparsities[-1]] for bucket in exchange._buckets]
        return [
            (plan.way == "owners", state.w.size > 0) for plan, state in zip(plans, exchange.state.buckets, strict=True)
        ]

    (found, *_) = on_owners(rank, **options)
    assert all(deals == holds for deals, holds in found)


def test_a_users_object_that_is_no_transport_gathers():
    class Plain:
        def __init__(self, transport):
            self.rank, self.size, self.name, self.close = transport.rank, transport.size, "plain", transport.close
            self.allgather, self.allreduce = transport.allgather, transport.allreduce
            self.alltoall = None  # perhaps another library's, with other arguments

    def rank(transport):
        exchange = make(as_transport(Plain(transport)))
        run_step(exchange, given(0, transport.rank))
        return exchange.ways()

    assert run_ranks(RANKS, rank) == ["gathered"] * RANKS


def test_nodes_deal_as_single_ranks():
    def steps(exchange, rank):
        assert exchange.ways() == "owners"
        results = [run_step(exchange, given(s, rank))[1] for s in range(3)]
        return results, exchange.state.buckets[0].w

    rows = on_owners(steps, 2 * RANKS, nodes=[r - r % 2 for r in range(2 * RANKS)])
    for i, (results, w) in enumerate(rows):
        np.testing.assert_array_equal(w, rows[i - i % 2][1])
        same_results(rows[0][0], results)


@needs_compiler
def test_on_a_device_all_buckets_add_up_sums_on_the_same_threads(monkeypatch):
    made, usual = [], NumbaKernels.__init__

    def counted(self, *arguments):
        made.append(self)
        usual(self, *arguments)

    monkeypatch.setattr(NumbaKernels, "__init__", counted)

    def step(exchange, rank):
        assert (exchange.ways(), len(exchange._buckets)) == ("owners", 3)
        run_step(exchange, given(0, rank))

    on_owners(step, kernels=fake_kernels(), bucket_bytes=30_000)
    assert len(made) == RANKS, "each rank has its own exchange"


def test_a_loaded_job_selects_the_same_sums():
    """With a tensor for which kernels learn thresholds."""
    shapes = {"a": (500, 400)}
    options = {"sparsity": 0.99, "momentum": 0.9, "values": "int2", "kernels": NumbaKernels()}

    def one_rank(exchange, rank):
        def steps(exchange, numbers):
            given = [gradients(n, rank, shapes)[0] * np.float32(1 + 0.05 * n) for n in numbers]
            return [run_step(exchange, [g])[1] for g in given]

        assert exchange.ways() == "owners"
        other = make_exchange(exchange.transport, shapes, **options)
        steps(exchange, range(12))
        exchange.average()
        other.load_state_dict(exchange.state_dict())
        same_results(steps(exchange, range(12, 24)), steps(other, range(12, 24)))

    on_ranks(RANKS, one_rank, shapes, **options)


@pytest.mark.parametrize("options", [{"small": "float32"}, {"bucket_bytes": 1600}])
def test_loaded_sums_of_small_tensors_are_sent_by_a_job_with_other_options(options):
    shapes = {"a": (300, 70), "s1": (400,), "b": (64, 64), "bias": (333,)}

    def unsent(exchange):
        return sum(float(np.abs(b.error).sum() + np.abs(b.owned_error).sum()) for b in exchange.state.buckets)

    def one_rank(exchange, rank):
        for step in range(4):
            run_step(exchange, gradients(step, rank, shapes))
        other = make_exchange(exchange.transport, shapes, **{**OPTIONS, **options})
        other.load_state_dict(exchange.state_dict())
        before = unsent(other)
        for _ in range(6):
            run_step(other, [np.zeros_like(g) for g in gradients(0, 0, shapes)])
        return before, unsent(other)

    before, after = np.sum(on_ranks(RANKS, one_rank, shapes, **OPTIONS), axis=0)
    assert 0 < before
    assert after < before / 100
