"""The thresholds: exactly the k largest nearly always, whatever the gradients do, and never more than k."""

import math

import numpy as np
import pytest
from kernel_tools import Trainee

from dgc.core.kernels import threshold as rules
from dgc.core.kernels.base import SegmentWork
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.kernels.sweep import select_whole
from dgc.core.kernels.threads import Team
from dgc.core.kernels.threshold import new_thresholds

N = 100_000


@pytest.fixture(scope="module")
def kernels():
    return NumbaKernels(2)


class Gradients:
    """Drifting, heavy-tailed: each element has a scale of its own, the noise is new at every step."""

    def __init__(self, n, seed, tail=1.0):
        self.rng = np.random.default_rng(seed)
        self.scale = (np.exp(tail * self.rng.standard_normal(n)) * 1e-3).astype(np.float32)
        self.mean = (0.1 * self.rng.standard_normal(n)).astype(np.float32)

    def draw(self, factor=1.0):
        noise = self.rng.standard_normal(len(self.scale), dtype=np.float32)
        return self.scale * (self.mean + noise) * np.float32(factor)


def histogram_steps(monkeypatch):
    """Count the selections that needed all entries of a segment after the pass."""
    calls = []
    original = Team.run

    def counted(self, threads, kernel, pieces, *rest):
        if kernel is select_whole:
            calls.append(pieces)
        original(self, threads, kernel, pieces, *rest)

    monkeypatch.setattr(Team, "run", counted)
    return calls


@pytest.mark.parametrize("density", [0.001, 0.01])
@pytest.mark.parametrize("flags", [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {}])
@pytest.mark.parametrize("tail", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("n", [9408, 16_384, N])
def test_200_drifting_steps_are_exact(kernels, monkeypatch, density, flags, tail, n):
    calls = histogram_steps(monkeypatch)
    trainee = Trainee(kernels, n, int(n * density), **flags)
    gradients = Gradients(n, 1, tail)
    for t in range(200):
        trainee.step(gradients.draw(0.995**t * (1 + 0.3 * math.sin(t / 15))))
    assert trainee.exact >= 0.99 * 200
    assert trainee.most_short_in_a_row <= 1
    assert len(calls) <= 6, "nearly every step must do with its candidates"


def test_ramp_up_is_exact_at_every_density(kernels):
    trainee = Trainee(kernels, N, 0, momentum=0.9)
    gradients = Gradients(N, 4)
    for density in (0.25, 0.0625, 0.015625, 0.004, 0.001, 0.25, 0.001):
        for _ in range(4):
            k = int(N * density)
            assert len(trainee.step(gradients.draw(), k)) == k


@pytest.mark.parametrize(("before", "after"), [(1.0, 1000.0), (1.0, 1e-3), (1.0, 1e6), (1.0, 1e-6), (0.0, 1.0)])
def test_a_jump_of_the_gradient_is_caught_in_the_same_step(kernels, before, after):
    trainee = Trainee(kernels, N, 100)  # no momentum, and nothing is left of the past
    gradients = Gradients(N, 5)
    for t in range(12):
        trainee.v[:] = 0
        trainee.step(gradients.draw(after if t >= 6 else before))
    assert trainee.exact == 12


def test_a_flood_of_candidates_favours_no_position(kernels):
    trainee = Trainee(kernels, N, 100)
    gradients = Gradients(N, 6, tail=0.0)
    taken = []
    for t in range(40):
        trainee.v[:] = 0
        positions = trainee.step(gradients.draw(1000.0 if t % 2 else 1.0))
        if t % 2:
            taken.append(positions)
    assert trainee.exact == 40
    middle = np.concatenate(taken).mean()
    # 2000 uniform positions: the mean's standard deviation is N / sqrt(12 * 2000).
    assert abs(middle - N / 2) < 4 * N / math.sqrt(12 * 2000)


@pytest.mark.parametrize(("share", "expected"), [(0.95, 950), (0.81, 810), (0.7, 1000), (0.0, 1000)])
def test_a_shortfall_is_less_than_a_fifth_and_over_at_the_next_step(kernels, share, expected):
    """The whole tensor shrinks so far that only a share of k reaches the threshold."""
    k = 1000
    ramp = np.linspace(1, 2, N, dtype=np.float32)
    trainee = Trainee(kernels, N, k)
    for _ in range(10):
        trainee.v[:] = 0
        assert len(trainee.step(ramp)) == k
    threshold = trainee.thresholds[0, rules.NEXT]
    trainee.v[:] = 0
    shrunk = ramp * np.float32(threshold / ramp[-int(share * k)]) if share else ramp * np.float32(0.1)
    count = len(trainee.step(shrunk))
    assert count == pytest.approx(expected, abs=0 if expected == k else 3)
    assert count >= 0.8 * k
    for _ in range(3):
        trainee.v[:] = 0
        assert len(trainee.step(shrunk)) == k


@pytest.mark.parametrize("n", [100, 5000, 40_000, 300_000])
@pytest.mark.parametrize("value", [1.0, -1e-30, 5e-45])
def test_equal_entries_go_by_position(kernels, n, value):
    trainee = Trainee(kernels, n, n // 50)
    for _ in range(3):
        trainee.v[:] = 0
        np.testing.assert_array_equal(trainee.step(np.full(n, value, np.float32)), np.arange(n // 50))


@pytest.mark.parametrize("n", [1, 64, 5000, 300_000])
def test_zeros_are_never_selected_and_cost_no_histogram(kernels, monkeypatch, n):
    calls = histogram_steps(monkeypatch)
    trainee = Trainee(kernels, n, max(1, n // 100), momentum=0.9)
    for _ in range(5):
        assert len(trainee.step(np.zeros(n, np.float32))) == 0
    assert len(calls) <= 1, "only a tensor that nothing is known of"
    g = np.zeros(n, np.float32)
    g[n // 2] = -1e-30
    np.testing.assert_array_equal(trainee.step(g), [n // 2])
    assert len(calls) <= 1


def test_fewer_entries_than_k_are_all_sent_without_a_histogram(kernels, monkeypatch):
    trainee = Trainee(kernels, N, 500)
    rng = np.random.default_rng(7)
    trainee.step(np.zeros(N, np.float32))
    calls = histogram_steps(monkeypatch)
    for _ in range(5):
        g = np.zeros(N, np.float32)
        where = rng.choice(N, 300, replace=False)
        g[where] = rng.standard_normal(300)
        np.testing.assert_array_equal(trainee.step(g), np.sort(where))
    assert not calls


@pytest.mark.parametrize("cycle", [1, 4, 60], ids=["the same batch", "four batches", "new batches"])
def test_residuals_that_pile_up_are_foreseen(kernels, monkeypatch, cycle):
    """At the start and after each change of density all residuals grow, for hundreds of steps, ever more slowly."""
    calls = histogram_steps(monkeypatch)
    n, k = 500_000, 500
    rng = np.random.default_rng(9)
    gradients = [rng.standard_normal(n, dtype=np.float32) for _ in range(cycle)]
    u, v, thresholds = np.zeros(n, np.float32), np.zeros(n, np.float32), new_thresholds(1)
    candidates = []
    for t in range(60):
        reached = thresholds[0, rules.NEXT]
        work = [SegmentWork(gradients[t % cycle], None, 0, n, k, 0.9)]
        found = kernels.accumulate_and_select(work, u, v, thresholds)
        assert len(found.positions) >= 0.9 * k
        candidates.append(np.count_nonzero(np.abs(v) >= reached) / k)
        kernels.take_out(u, v, found.positions, found.values, masking=True)
    assert len(calls) <= 5, "of 60; each reads all residuals once more"
    assert np.mean(candidates[10:]) <= 5, "times k are looked at, where k are sent"


@pytest.mark.parametrize("hot", [slice(0, 3000), slice(60_000, 63_000)])
def test_entries_that_crowd_in_one_place(kernels, hot):
    """The rows of an embedding that a batch has met."""
    trainee = Trainee(kernels, N, 1000, momentum=0.9)
    rng = np.random.default_rng(9)
    for _ in range(20):
        g = np.zeros(N, np.float32)
        g[hot] = rng.standard_normal(3000)
        assert len(trainee.step(g)) == 1000


@pytest.mark.parametrize("n", [5000, 300_000])
def test_every_value_of_every_size(kernels, n):
    """Magnitudes over the whole range of the type, so that a histogram has to go all the way down."""
    rng = np.random.default_rng(10)
    trainee = Trainee(kernels, n, n // 10)
    for k in (1, 7, n // 1000 + 1, n // 10, n - 1, n):
        trainee.v[:] = 0
        g = (rng.standard_normal(n) * 10.0 ** rng.uniform(-37, 37, n)).astype(np.float32)
        g[rng.random(n) < 0.1] = 0
        assert len(trainee.step(g, k)) == min(k, np.count_nonzero(g))


def test_thresholds_that_are_not_known_collect_nothing():
    row = rules.new_thresholds(1)[0]
    assert rules.threshold(row, 100, N) == math.inf
    rules.learn(row, 100, 0.9, 200, 1.0)
    assert 0 < rules.threshold(row, 100, N) < 1
    assert rules.threshold(row, 101, N) == math.inf, "another k"
    assert rules.threshold(row, 0, N) == math.inf
    assert rules.threshold(row, N // 2, N) == math.inf, "a high density"
    assert rules.threshold(row, 5, 4096) == 0, "a small segment"
    rules.learn(row, 100, 0.9, 200, math.inf)
    assert np.isnan(row).all(), "a residual that overflowed teaches nothing"
