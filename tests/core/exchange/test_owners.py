"""Ranks that add up entries for each other: what they send, keep and refuse; ranks are threads."""

from types import SimpleNamespace

import numpy as np
import pytest
from exchange_tools import errors_of, gradients, make_exchange, on_ranks, parameters, run_step, same_results
from fake_device import fake_kernels, needs_compiler

from dgc.core.collectives import Transport, as_transport
from dgc.core.compressors import make_config
from dgc.core.compressors.base import SparseValues
from dgc.core.exchange import owners, sizes
from dgc.core.exchange.encoders import TopKEncoder
from dgc.core.exchange.owners import Owners
from dgc.core.exchange.sizes import Setting
from dgc.core.exchange.stats import StepStats
from dgc.core.exchange.step import StepOptions
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.layout import make_layout
from dgc.core.message import Flags, Incoming
from dgc.core.state import BucketState
from dgc.core.stripes import owners_of
from dgc.errors import DGCError, LayoutError, WireError
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


def given(step, rank, value=None):
    """A rank's gradients of a step, one of them spoilt if there is a value."""
    own = gradients(step, rank, SHAPES)
    if value is not None:
        own[0][5] = value
    return own


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


def train(ranks=RANKS, steps=4, poisoned=None, **options):
    """Returns per rank the sum of results, the sum of gradients, v and w, by name; and the exchange."""

    def one_rank(exchange, rank):
        assert exchange.ways() == "owners"
        sent, came = ({n: np.zeros(np.prod(SHAPES[n])) for n in SHAPES} for _ in range(2))
        for step in range(steps):
            grads = given(step, rank, np.nan if poisoned == (step, rank) else None)
            refused, results = run_step(exchange, grads)
            assert refused == (poisoned is not None and poisoned[0] == step)
            for name, g, result in zip(SHAPES, grads, results, strict=True):
                came[name] += 0 if refused and g.size < 1000 else np.nan_to_num(g)  # small tensors forget such a step
                sent[name] += 0 if refused else result
        return sent, came, residuals(exchange), exchange

    return on_owners(one_rank, ranks, **options)


def is_conserved(rows, factor=1 / RANKS):
    for name in SHAPES:
        sent = rows[0][0][name] / factor
        kept = sum(v + w for v, w in (row[2][name] for row in rows))
        given = sum(row[1][name] for row in rows)
        np.testing.assert_allclose(sent + kept, given, atol=2e-5)


@WHEREVER
@pytest.mark.parametrize("values", ["float32", "int2"])
def test_what_was_given_was_sent_or_is_in_v_or_in_w(values, make_kernels):
    rows = train(values=values, kernels=make_kernels())
    is_conserved(rows)
    assert all(row[2]["a"][1].any() for row in rows), "sums beyond the budget wait in w"
    assert any(row[2]["small"][1].any() for row in rows), "so does the codec's error of small tensors' sums"


def test_entries_that_do_not_fit_a_part_stay_in_v(monkeypatch):
    monkeypatch.setattr(owners, "PART_MARGIN", -4.0)
    rows = train(steps=1)
    is_conserved(rows)
    room = rows[0][3]._buckets[0].plan.capacity * RANKS
    for row in rows:
        assert row[3].stats.last.entries_sent <= room < sum(row[3]._buckets[0].plan.encoder.ks)


def plan_of(transport, density):
    """One rank's plan of the only bucket, in the middle of a step, and that bucket."""
    config = make_config({"min_numel": 64, "values": "float32", "small": "float32"})
    (bucket,) = make_layout(parameters(SHAPES), config).buckets
    setting = Setting(bucket, config, density, RANKS, transport.rank)
    plan = Owners(setting, TopKEncoder(setting))
    plan.begin(SimpleNamespace(number=0, fingerprint=0, stats=StepStats()))
    plan.prepare(transport, ReferenceKernels())
    return plan, bucket


def test_of_entries_that_do_not_fit_the_smallest_stay(monkeypatch):
    monkeypatch.setattr(owners, "PART_MARGIN", -4.0)
    plan, _ = plan_of(SimpleNamespace(rank=0, size=RANKS), 0.03)
    values = np.random.default_rng(0).standard_normal(800).astype(np.float32)
    sent = plan.write_parts(SparseValues(np.arange(800), values))
    assert 0 < plan.capacity < 100
    for rank in range(RANKS):
        mine = np.flatnonzero(owners_of(np.arange(800), RANKS) == rank)
        largest = mine[np.argsort(-np.abs(values[mine]))[: plan.capacity]]
        np.testing.assert_array_equal(sent.positions[owners_of(sent.positions, RANKS) == rank], np.sort(largest))


def test_every_rank_has_the_same_results():
    rows = train(values="int2")
    for row in rows[1:]:
        for name in SHAPES:
            np.testing.assert_array_equal(row[0][name], rows[0][0][name])


def test_all_kernels_have_the_same_results():
    first, second = (train(kernels=kernels) for kernels in (ReferenceKernels(), NumbaKernels()))
    for a, b in zip(first, second, strict=True):
        for name in SHAPES:
            np.testing.assert_array_equal(a[0][name], b[0][name])
            np.testing.assert_array_equal(a[2][name], b[2][name])


def test_with_room_for_all_the_owners_sums_are_those_of_all_entries(monkeypatch):
    monkeypatch.setattr(owners, "PART_MARGIN", 100.0)
    monkeypatch.setattr(owners, "SUMS_PER_ENTRY", 1000)
    bucket = plan_of(SimpleNamespace(rank=0, size=RANKS), 0.03)[1]
    k, expected = 900, np.zeros(bucket.sparse_size, np.float32)
    inside = np.concatenate([np.arange(s.offset, s.slice.stop) for s in bucket.sparse])
    entries = []
    for rank in range(RANKS):
        rng = np.random.default_rng(rank)
        positions = np.sort(rng.choice(inside, k, replace=False))
        entries.append(SparseValues(positions, rng.standard_normal(k).astype(np.float32)))
        expected[positions] += entries[-1].values

    def rank(transport):
        plan, _ = plan_of(transport, 0.03)
        plan.write_parts(entries[transport.rank])
        plan.send_parts()
        state = BucketState(bucket, ReferenceKernels().memory, plan.stripes)
        count, nonfinite = plan.add_up_parts(state)
        assert not nonfinite
        plan.commit(state)
        assert not state.w.any()
        payload = plan.messages.payload
        found = plan.decode(Incoming(transport.rank, "", count, False, payload, payload, payload, 0))
        assert (owners_of(found.positions, RANKS) == transport.rank).all()
        return found

    total = np.zeros_like(expected)
    for found in run_ranks(RANKS, rank):
        total[found.positions] += found.values
    np.testing.assert_array_equal(total, expected)


# -- refused and failed steps ------------------------------------------------------------------------------------------


def test_a_refused_step_leaves_w_as_it_was_and_its_gradients_in_v():
    before, rows = train(steps=2), train(steps=3, poisoned=(2, 3))
    for old, new in zip(before, rows, strict=True):
        for name in SHAPES:
            np.testing.assert_array_equal(new[2][name][1], old[2][name][1])
    is_conserved(rows)


def test_a_sum_that_overflows_on_its_owner_is_refused_on_all_ranks():
    def step(exchange, rank):
        gradients = given(0, rank, 3e38)
        refused, _ = run_step(exchange, gradients)
        v, w = residuals(exchange)["a"]
        return refused, w.any(), np.array_equal(v, gradients[0])

    assert on_owners(step) == [(True, False, True)] * RANKS


def test_an_error_before_the_parts_are_out_reaches_all_ranks():
    def step(exchange, rank):
        if rank == 2:
            exchange.fail(LayoutError("mine"))
        run_step(exchange, given(0, rank))

    errors = errors_of(RANKS, step, SHAPES, **OPTIONS)
    assert [str(e) for e in errors] == ["rank 2 failed in step 0: mine"] * RANKS


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


class Damaging(Transport):
    """A transport that calls ``change`` with what a rank receives in one collective, or in both."""

    def __init__(self, transport, collective, change):
        self.rank, self.size, self.name = transport.rank, transport.size, "damaging"
        self.given, self.collective, self.change = transport, collective, change

    def allgather(self, message, out):
        self.given.allgather(message, out)
        if "allgather" in self.collective:
            self.change(out)

    def alltoall(self, message, out):
        self.given.alltoall(message, out)
        if "alltoall" in self.collective:
            self.change(out)

    def allreduce(self, array, op="sum"):
        self.given.allreduce(array, op)

    def close(self):
        self.given.close()


def damaged(damaged_rank, change):
    """The results of each rank's step, or its error, where one rank receives other parts than were sent."""

    def rank(transport):
        damages = change if transport.rank == damaged_rank else lambda out: None
        exchange = make(Damaging(transport, "alltoall", damages))
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

    for error in damaged(3, change):
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

    def rank(transport):
        damages = change if transport.rank == 3 else lambda out: None
        exchange = make(Damaging(transport, "allgather", damages))
        try:
            return [r.tobytes() for r in run_step(exchange, given(0, transport.rank))[1]]
        except WireError as error:
            return str(error)

    ended = run_ranks(RANKS, rank)
    error = ended.pop(3)
    assert "rank 5" in error
    assert text in error
    assert all(results == ended[0] for results in ended)


@pytest.mark.parametrize("seed", range(12))
def test_random_damage_of_a_part_never_ends_in_different_results(seed):
    """A damaged value cannot be seen; everything else is an error of all ranks."""

    def change(out):
        rng = np.random.default_rng(seed)
        row, at = rng.integers(RANKS), rng.integers(min(200, out.shape[1] - 8))
        out[row, at : at + 4] = rng.integers(0, 256, 4)

    ended = damaged(1, change)
    assert all(isinstance(e, DGCError) for e in ended) or all(e == ended[0] for e in ended)


def test_a_step_in_which_every_rank_has_joined_leaves_w_as_it_was():
    def steps(exchange, rank):
        run_step(exchange, given(0, rank))
        before = residuals(exchange)
        run_step(exchange, [np.zeros_like(g) for g in given(0, 0)], options=StepOptions(joins=Flags.JOINED))
        after = residuals(exchange)
        return all(np.array_equal(before[n], after[n]) for n in SHAPES) and before["a"][1].any()

    assert all(on_owners(steps))


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


def test_a_loaded_run_goes_on_bit_for_bit():
    def rank(transport):
        def steps(exchange, first, stop):
            return [run_step(exchange, given(s, transport.rank))[1] for s in range(first, stop)]

        straight, half, fresh = (make(transport, momentum=0.9, values="int2") for _ in range(3))
        for each in (straight, half):
            steps(each, 0, 3)
            each.average()
        expected = steps(straight, 3, 6)
        fresh.load_state_dict(half.state_dict())
        same_results(expected, steps(fresh, 3, 6))

    run_ranks(RANKS, rank)


def test_a_saved_state_holds_w_with_v_and_an_average_keeps_the_mean():
    def one_rank(exchange, rank):
        for step in range(4):
            run_step(exchange, given(step, rank))
        before, saved = residuals(exchange), exchange.state_dict()["parameters"]
        exchange.average()
        return before, saved, exchange.state_dict()["parameters"]

    rows = on_owners(one_rank)
    assert any(before["a"][1].any() for before, *_ in rows)
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
        carrier = Damaging(transport, "alltoall, allgather", lambda out: came.append(out.nbytes - out.shape[1]))
        exchange = make(carrier, values="int2")
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
        results = []
        for exchange in ("auto", "gather"):
            made = make(as_transport(Plain(transport)), exchange=exchange)
            results.append(run_step(made, given(0, transport.rank))[1])
        for a, b in zip(*results, strict=True):
            np.testing.assert_array_equal(a, b)

    run_ranks(RANKS, rank)


def test_topk_deals():
    is_conserved(train(algorithm="topk", values="float32"))


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

    def one_rank(transport):
        def made():
            options = {"sparsity": 0.99, "momentum": 0.9, "values": "int2"}
            made = make_exchange(transport, {"a": (500, 400)}, **options, kernels=NumbaKernels())
            assert made.ways() == "owners"
            return made

        def steps(exchange, numbers):
            rngs = [np.random.default_rng([step, transport.rank]) for step in numbers]
            given = [
                (rng.standard_normal(200_000) * (1 + 0.05 * n)).astype("f")
                for n, rng in zip(numbers, rngs, strict=True)
            ]
            return [run_step(exchange, [g])[1][0] for g in given]

        exchange, other = made(), made()
        steps(exchange, range(12))
        exchange.average()
        other.load_state_dict(exchange.state_dict())
        pairs = list(zip(steps(exchange, range(12, 24)), steps(other, range(12, 24)), strict=True))
        exchange.close()
        other.close()
        return [int((a != b).sum()) for a, b in pairs]

    assert run_ranks(RANKS, one_rank) == [[0] * 12] * RANKS


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
