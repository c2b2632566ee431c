"""The law of step-ahead error feedback, on ranks that are threads."""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from dgc.core.compressors import make_config
from dgc.core.exchange import choice
from dgc.core.kernels import choose_kernels
from dgc.core.kernels.base import PIECE
from dgc.core.layout import Parameter
from dgc.core.noise_scale import NoiseScale
from dgc.core.step_ahead import StepAhead
from dgc.errors import ConfigError, RemoteError
from dgc.transport.local import run_ranks

SHAPES = {"matrix": (64, 48), "other": (40, 40), "small": (64,)}
EXACT = {"sparsity": 0.0, "values": "float32", "small": "float32"}
STEPS = 12


@dataclass
class Ended:
    """What a rank has at the end: theta, p, a and the sum of its scaled updates, by parameter."""

    shared: list
    values: list
    ahead: list
    updates: list
    ways: str


def first_values():
    rng = np.random.default_rng(5)
    return [rng.normal(size=math.prod(shape)).astype(np.float32) for shape in SHAPES.values()]


def on_ranks(ranks, function, *, rescales=False, rounding=lambda rank, index: None, **options):
    """Call ``function(ahead, values, rank)`` on each rank, which has started with these values; return the results."""
    config = make_config({"error_feedback": "step-ahead", **options})
    parameters = [Parameter(name, shape, "float32") for name, shape in SHAPES.items()]

    def job(transport):
        given = {"rescales": rescales, "rounding": partial(rounding, transport.rank)}
        ahead, values = StepAhead(parameters, config, transport, choose_kernels("cpu"), **given), first_values()
        ahead.start(values)
        found = function(ahead, values, transport.rank)
        ahead.exchange.close()
        return found

    return run_ranks(ranks, job)


def move(ahead, values, updates, *, late=False, **given):
    """One step of an optimizer that adds ``updates``, and its exchange."""
    for value, update in zip(values, updates, strict=True):
        value += update
    sent = [value + 0 for value in values] if late else values
    gradients = given.pop("gradients", [None] * len(values))
    ahead.step(values, gradients, [0.0] * len(values), sent, sent, late=late, **given)


def trained(ranks, late, *, average=False, **options):
    def job(ahead, values, rank):
        rng, total = np.random.default_rng(100 + rank), [np.zeros_like(v) for v in values]
        for _ in range(STEPS):
            updates = [0.01 * rng.normal(size=v.size).astype(np.float32) for v in values]
            move(ahead, values, updates, late=late)
            for each, update in zip(total, updates, strict=True):
                each += update
        ahead.settle()
        ahead.write(values)
        if average:
            ahead.average(values)
        entries = ahead.exchange.state.to_dict()["parameters"].values()
        kept = [entry.get("v", entry.get("error", 0 * v)) for entry, v in zip(entries, values, strict=True)]
        return Ended(ahead.shared, values, kept, total, ahead.exchange.ways())

    return on_ranks(ranks, job, **options)


SETTINGS = {
    "exact": EXACT,
    "entries": {"sparsity": 0.95, "small": "float32"},
    "coded": {"sparsity": 0.95, "values": "int2"},
    "ramp": {"sparsity": [0.8, 0.95], "rampup_step": 8},
    "owners": {"sparsity": 0.9, "values": "int4"},
}


@pytest.fixture(params=SETTINGS)
def options(request, monkeypatch):
    if request.param == "owners":
        monkeypatch.setattr(choice, "OWNERS_SHARE", math.inf)  # whatever they cost
    return SETTINGS[request.param]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_what_was_sent_and_what_is_left_add_up_to_the_updates(options, late):
    """Theta moves by the mean of what was sent, and the rest is a (for small tensors, the codec's error)."""
    ranks = trained(3, late, **options)
    assert (ranks[0].ways == "owners") is (options is SETTINGS["owners"])
    for i, before in enumerate(first_values()):
        mean = np.mean([rank.updates[i] for rank in ranks], axis=0)
        left = np.mean([rank.ahead[i] for rank in ranks], axis=0)
        np.testing.assert_allclose(ranks[0].shared[i] + left, before + mean, atol=2e-6)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_shared_values_are_the_same_bits_on_all_ranks(options, late):
    ranks = trained(3, late, **options)
    for other in ranks[1:]:
        assert all(map(np.array_equal, ranks[0].shared, other.shared))


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_a_rank_computes_with_the_shared_values_and_what_it_has_not_sent(late):
    for rank in trained(2, late, sparsity=0.95):
        for i in range(2):
            assert rank.ahead[i].any()
            np.testing.assert_array_equal(rank.values[i], rank.shared[i] + rank.ahead[i])


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_an_average_leaves_nothing_unsent(late):
    ranks = trained(3, late, average=True, sparsity=0.95)
    for i, before in enumerate(first_values()):
        mean = np.mean([rank.updates[i] for rank in ranks], axis=0)
        np.testing.assert_allclose(ranks[0].values[i], before + mean, atol=2e-6)
        assert all(np.array_equal(ranks[0].values[i], rank.values[i]) for rank in ranks)
        assert not any(rank.ahead[i].any() for rank in ranks)


def test_late_contributions_of_other_ranks_arrive_one_step_later():
    """The only update is made by rank 1 in step 0."""

    def job(ahead, values, rank):
        seen = []
        for step in range(2):
            size = 1.0 if rank == 1 and step == 0 else 0.0
            move(ahead, values, [np.full_like(v, size) for v in values], late=True)
            seen.append([float((v - first).mean()) for v, first in zip(values, first_values(), strict=True)])
        ahead.settle()
        return seen

    one, other = on_ranks(2, job, **EXACT)
    np.testing.assert_allclose(one, [[0.0] * 3, [0.5] * 3], atol=1e-6)
    np.testing.assert_allclose(other, [[1.0] * 3, [0.5] * 3], atol=1e-6)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_an_update_that_is_not_finite_is_one_error_on_all_ranks(late):
    def job(ahead, values, rank):
        updates = [0.01 * v for v in values]
        move(ahead, values, updates, late=late)
        updates[0][3] = np.nan if rank == 1 else 0.0

        def refused():
            move(ahead, values, updates, late=late)
            ahead.settle()

        met = "rank 1 in the update of 'matrix'" if rank == 1 else "rank 1, whose own message names the parameter"
        with pytest.raises(ConfigError, match=met):
            refused()
        ahead.write(values)
        return values, ahead.shared

    ranks = on_ranks(2, job, sparsity=0.9)
    assert all(np.isfinite(value).all() for values, _ in ranks for value in values)
    assert all(map(np.array_equal, ranks[0][1], ranks[1][1]))


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("editing", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_parameters_that_a_script_changes_between_steps_are_averaged(editing, late):
    def job(ahead, values, rank):
        move(ahead, values, [0.01 * v * (1 + rank) for v in values], late=late)
        edited = rank in editing
        for value in values:
            value += edited * (1.0 + rank)
        before = [value.copy() for value in values]
        move(ahead, values, [0.0 * v for v in values], edited=edited, late=late)
        ahead.settle()
        ahead.write(values)
        assert ahead.exchange.edited == set(editing)
        return before, values

    ranks = on_ranks(2, job, sparsity=0.95, small="float32")
    for i in range(3):
        assert np.array_equal(ranks[0][1][i], ranks[1][1][i])
        if not late:
            np.testing.assert_allclose(ranks[0][1][i], (ranks[0][0][i] + ranks[1][0][i]) / 2, atol=1e-5)


@pytest.mark.parametrize("small", ["float32", "int3"])
@pytest.mark.parametrize("editing", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_an_average_keeps_what_a_script_has_changed(editing, small):
    def job(ahead, values, rank):
        move(ahead, values, [0.01 * v * (1 + rank) for v in values])
        for value in values:
            value += (rank in editing) * (1.0 + rank)
        before = [value.copy() for value in values]
        ahead.average(values)
        assert not any(ahead.exchange.state.residual(i).any() for i in range(3))
        return before, values

    ranks = on_ranks(2, job, sparsity=0.95, small=small)
    for i in range(3):
        assert np.array_equal(ranks[0][1][i], ranks[1][1][i])
        np.testing.assert_allclose(ranks[0][1][i], (ranks[0][0][i] + ranks[1][0][i]) / 2, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("noise", [0.0, 1.0, 10.0])
def test_the_noise_scale_is_the_ratio_of_the_squares_of_one_gradient_and_of_the_mean(noise, ranks):
    rng, n = np.random.default_rng(3), 200 * PIECE + 5
    signal = 1 + rng.normal(size=n).astype(np.float32)  # pieces are alike, as with a constant gradient
    noises = np.repeat([noise, 0.0], [150 * PIECE, n - 150 * PIECE]).astype(np.float32)
    scales = [NoiseScale([n, 7], ranks, 0, np.asarray, np.array) for _ in range(ranks)]
    for step in range(100):
        for scale in scales:
            gradient = signal + noises * rng.normal(size=n).astype(np.float32)
            scale.measure(step, [gradient, None if step % 4 else signal[:7]])
        mean = np.mean([scale.message for scale in scales], axis=0)
        for scale in scales:
            scale.message[...] = mean
            scale.learn()
    factors = scales[0].scales()
    assert all(np.array_equal(scale.scales(), factors) for scale in scales)
    whole, small = (factors[groups] for groups in scales[0].groups)
    np.testing.assert_allclose(small, 1.0, rtol=1e-3)  # the ranks agree, though most steps have no gradient
    if ranks == 2:
        rho = (2 + 0.75 * noise**2 / ranks) / (2 + 0.75 * noise**2)  # of the whole tensor
        np.testing.assert_allclose(whole, 1 / math.sqrt(rho), rtol=0.15)
    else:
        rho = (2 + noise**2 / ranks) / (2 + noise**2)
        assert len(whole) == 201  # the rest of 5 elements has a factor, too
        assert np.median(whole[:150]) == pytest.approx(1 / math.sqrt(rho), rel=0.1)
        assert np.quantile(whole[:150], 0.05) > 0.8 / math.sqrt(rho)  # about 80 projections of a piece are averaged
        np.testing.assert_allclose(whole[150:], 1.0, rtol=1e-3)


def load_noise(ahead, ranks):
    """Start with another factor for each group; return the factor of each element."""
    groups = ahead.noise.groups
    squares = np.linspace(1.1, ranks, groups[-1].stop)
    ahead.load_noise([[1.0] * len(squares), squares.tolist()])
    ahead.start(first_values())
    sizes = [value.size for value in first_values()]  # on two ranks, a tensor has one factor
    return [np.repeat(np.sqrt(squares[g]), n if ranks == 2 else PIECE)[:n] for g, n in zip(groups, sizes, strict=True)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_updates_of_adaptive_optimizers_are_scaled_and_their_weight_decay_is_not(ranks):
    def job(ahead, values, rank):
        factors, decay = load_noise(ahead, ranks), 0.01
        for value in values:
            value += 0.5 - decay * value
        ahead.step(values, [None] * 3, [decay] * 3, values, values)
        for value, first, factor in zip(values, first_values(), factors, strict=True):
            np.testing.assert_allclose(value - first + decay * first, 0.5 * factor, rtol=1e-4)

    on_ranks(ranks, job, rescales=True, **EXACT)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_with_many_ranks_a_rank_feels_its_own_update_and_sends_a_longer_one(ranks, late):
    """On two ranks it feels the longer one, too."""

    def job(ahead, values, rank):
        factors, rng = load_noise(ahead, ranks), np.random.default_rng(rank)
        updates = [rng.normal(size=v.size).astype(np.float32) for v in values]
        longer = [factor * update for factor, update in zip(factors, updates, strict=True)]
        felt = longer if ranks == 2 else updates
        move(ahead, values, updates, late=late)
        if late:
            for value, first, update in zip(values[:2], first_values(), felt, strict=False):
                np.testing.assert_allclose(value - first, update, atol=1e-5)
        ahead.settle()
        ahead.write(values)
        for i in range(2):
            a = np.array(ahead.exchange.state.residual(i))
            assert 0.85 < np.mean(a != 0) < 0.95
            np.testing.assert_allclose(a, longer[i] * (a != 0), atol=1e-5)
            np.testing.assert_allclose(values[i] - ahead.shared[i], felt[i] * (a != 0), atol=1e-5)
        assert not ahead.is_edited(values)
        for value in values:
            value += 1.0
        assert ahead.is_edited(values)
        before = [value.copy() for value in values]
        move(ahead, values, [0 * v for v in values], edited=True)
        return before, values

    ended = on_ranks(ranks, job, rescales=True, sparsity=0.9, values="float32")
    for i in range(3):  # after an edit, only the ranks' parameters count, and not what they have not sent
        mean = np.mean([before[i] for before, _ in ended], axis=0)
        for _, values in ended:
            np.testing.assert_allclose(values[i], mean, atol=1e-5)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_weights_that_all_ranks_load_are_there_at_once_and_stay(late):
    def job(ahead, values, rank):
        load_noise(ahead, 4)
        rng = np.random.default_rng(rank)
        for _ in range(2):
            move(ahead, values, [rng.normal(size=v.size).astype(np.float32) for v in values], late=late)
        ahead.settle()  # late contributions of other ranks would be added to what is loaded
        for value in values:
            value[...] = 7.0
        seen = []
        for edited in (True, False):
            move(ahead, values, [0 * v for v in values], late=late, edited=edited)
            ahead.exchange.wait()
            assert not ahead.is_edited(values)
            seen += [value.copy() for value in values]
        ahead.settle()
        return seen

    for seen in on_ranks(4, job, rescales=True, sparsity=0.9):
        for values in seen:
            np.testing.assert_allclose(values, 7.0, atol=1e-5)


def test_a_step_of_sgd_beside_adaptive_ones_is_felt_as_it_is():
    def job(ahead, values, rank):
        load_noise(ahead, 4)
        move(ahead, values, [np.ones_like(v) for v in values], rescales=False)
        for value, first in zip(values, first_values(), strict=True):
            np.testing.assert_allclose(value, first + 1.0, atol=1e-5)

    on_ranks(4, job, rescales=True, sparsity=0.9, values="float32")


class NoMemory(np.ndarray):
    """An array that cannot be multiplied, which needs memory."""

    def __matmul__(self, other):
        raise MemoryError("no memory")

    __rmatmul__ = __array_ufunc__ = __matmul__


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("where", ["update", "noise scale"])
def test_an_error_of_one_rank_within_a_step_reaches_all_ranks(where, late):
    fails = []

    def rounding(rank, index):
        if rank in fails and where == "update" and index == 1:
            raise MemoryError("no memory")

    def job(ahead, values, rank):
        move(ahead, values, [0.01 * v for v in values], late=late)
        fails.extend([1] * rank)
        bad = rank and where == "noise scale"
        gradients = [v.view(NoMemory) if bad else v for v in values]

        def fail():
            move(ahead, values, [0.01 * v for v in values], late=late, gradients=gradients)
            ahead.settle()

        with pytest.raises(RemoteError, match="rank 1 failed in step 1: MemoryError: no memory"):
            fail()
        return ahead.shared

    ranks = on_ranks(2, job, rescales=True, rounding=rounding, sparsity=0.95)
    assert all(map(np.array_equal, *ranks))


def test_parameters_that_are_cast_later_do_not_count_as_edited():
    halves = []

    def half(values):
        return values.astype(np.float16).astype(np.float32)

    def job(ahead, values, rank):
        move(ahead, values, [0.01 * v for v in values])
        assert not ahead.is_edited(values)
        halves.append(rank)
        cast = [half(p) for p in values]
        assert not ahead.is_edited(cast)
        cast[0][5] += 1
        assert [tensor.is_edited(p) for tensor, p in zip(ahead.tensors, cast, strict=True)] == [True, False, False]

    on_ranks(2, job, rounding=lambda rank, _: half if rank in halves else None, sparsity=0.95)
