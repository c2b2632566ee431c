"""What the CPU kernels have of their own: blocks, tiles and vectors; passes that overlap: exchange/test_pipeline.py."""

import numpy as np
import pytest

from dgc.core.kernels.base import PIECE, MomentumRule, SegmentWork
from dgc.core.kernels.cpu import ALONE, TILE, NumbaKernels
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.kernels.threshold import new_thresholds
from dgc.errors import LayoutError


@pytest.fixture(scope="module")
def numba_kernels():
    return NumbaKernels(2)


@pytest.mark.parametrize("position", [0, 1, 63, 64, 4095, 32767, 32768, 69999])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_bad_entry_anywhere_is_met_and_counts_as_zero(numba_kernels, position, value):
    n = 70000
    g = np.ones(n, np.float32)
    g[position] = value
    u, v = np.ones(n, np.float32), np.ones(n, np.float32)
    thresholds = new_thresholds(1)
    for _ in range(2):  # cold, and with a threshold
        before = v[position], u[position]
        chosen = numba_kernels.accumulate_and_select([SegmentWork(g, None, 0, n, 70, 0.5)], u, v, thresholds)
        assert chosen.nonfinite
        assert np.isfinite(v).all()
        assert u[position] == 0.5 * before[1]
        assert v[position] == before[0] + u[position]
    g[position] = 1
    assert not numba_kernels.accumulate_and_select([SegmentWork(g, None, 0, n, 70, 0.5)], u, v, thresholds).nonfinite


@pytest.mark.parametrize("position", [0, 63, 4095, 69999])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "weight_decay": 0.1}]
)
def test_finite_values_that_add_up_to_infinity_are_met_and_change_nothing(numba_kernels, position, options):
    n = 70000
    largest = np.finfo(np.float32).max
    g, p = np.ones(n, np.float32), np.ones(n, np.float32)
    g[position] = 0.5 * largest
    work = [SegmentWork(g, p if "weight_decay" in options else None, 0, n, 70, **options)]
    u, v = np.ones(n, np.float32), np.ones(n, np.float32)
    v[position] = 0.7 * largest
    expected_u, expected_v = u.copy(), v.copy()
    for before, kernels in (((u, v), numba_kernels), ((expected_u, expected_v), ReferenceKernels())):
        own_u, own_v = before
        chosen = kernels.accumulate_and_select(work, own_u, own_v, new_thresholds(1))
        assert chosen.nonfinite
        assert np.isfinite(chosen.values).all()
        assert own_v[position] == np.float32(0.7 * largest)
        assert own_u[position] == 1
    np.testing.assert_array_equal(u, expected_u)
    np.testing.assert_array_equal(v, expected_v)
    assert not np.array_equal(v, np.ones(n))


def test_results_that_cannot_be_written_are_refused(numba_kernels):
    result = np.zeros(4, np.float32)
    result.flags.writeable = False
    with pytest.raises(LayoutError, match="read-only"):
        numba_kernels.set_entries([result], np.array([0, 4]), np.array([3]), np.ones(1, np.float32))
    v, half = np.zeros(10, np.float32), np.zeros(4, np.float16)
    for written, mean, u, message in ((v, v[:9], v, "10 elements"), (half, half, half, "float16")):
        with pytest.raises(LayoutError, match=message):
            numba_kernels.dense_update(written, mean, u, None, MomentumRule(momentum=0.9))


def test_dense_update_into_its_own_mean(numba_kernels):
    mean, u = np.arange(10, dtype=np.float32), np.ones(10, np.float32)
    numba_kernels.dense_update(mean, mean, u, None, MomentumRule(momentum=0.5, nesterov=True, scale=2.0))
    velocity = np.arange(10) + 0.5
    np.testing.assert_array_equal(u, velocity)
    np.testing.assert_array_equal(mean, 2 * (np.arange(10) + 0.5 * velocity))


def test_gradients_stay_as_they_are(numba_kernels):
    g = np.array([1, np.nan, 3] * 100, np.float32)
    copy = g.copy()
    g.flags.writeable = False
    v = np.zeros(300, np.float32)
    numba_kernels.accumulate([SegmentWork(g, None, 0, 300, 0, 0.9, scale=2.0)], v.copy(), v)
    np.testing.assert_array_equal(g, copy)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [1000, 6001, 262_151])
@pytest.mark.parametrize("broken", ["inf", "nan", "largest nan"])
@pytest.mark.parametrize("share", [0.0005, 0.1, 1.0])
def test_what_is_not_finite_in_a_residual_comes_first(threads, size, broken, share):
    rng = np.random.default_rng(0)
    v = rng.standard_normal(size).astype(np.float32)
    bad = np.sort(rng.choice(size, max(1, int(size * share)), replace=False))
    if broken == "largest nan":
        v.view(np.uint32)[bad] = 0x7FFFFFFF
    else:
        v[bad] = np.inf if broken == "inf" else np.nan
    kernels, k = NumbaKernels(threads), max(1, size // 100)
    u, thresholds, zeros = np.zeros(size, np.float32), new_thresholds(1), np.zeros(size, np.float32)
    for _ in range(3):
        before = v.copy()
        chosen = kernels.accumulate_and_select([SegmentWork(zeros, None, 0, size, k, 0.9)], u, v, thresholds)
        positions = chosen.positions
        assert len(positions) <= k
        assert np.all(np.diff(positions) > 0)
        assert positions.size == 0 or (positions[0] >= 0 and positions[-1] < size)
        np.testing.assert_array_equal(chosen.values, before[positions])
        if len(bad) >= k:
            assert np.isin(positions, bad).all()
        else:
            assert np.isin(bad, positions).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_norms_leave_out_what_is_not_finite_in_whichever_tile(dtype):
    kernels = [NumbaKernels(threads) for threads in (1, 2, 3)]
    rng = np.random.default_rng(2)
    lengths = [8 * TILE, 5 * TILE + 17, 4 * TILE - 1, TILE, 5, 0, 12 * TILE + 1]
    gradients = [rng.standard_normal(n).astype(dtype) for n in lengths]
    exact = [float(np.sum(g.astype(np.float64) ** 2)) for g in gradients]
    np.testing.assert_allclose(kernels[0].sums_of_squares(gradients), exact, rtol=1e-12)
    for place in range(TILE // 2, lengths[0], TILE):
        broken = [g.copy() for g in gradients]
        wanted = []
        for g, value in zip(broken, (np.inf, -np.inf, np.nan, np.inf, np.nan, 0, np.nan), strict=True):
            if place < g.size:
                g[place] = value
            wanted.append(float(np.sum(g[np.isfinite(g)].astype(np.float64) ** 2)))
        sums = [k.sums_of_squares(broken) for k in kernels]
        np.testing.assert_allclose(sums[0], wanted, rtol=1e-12)
        for other in sums[1:]:
            np.testing.assert_array_equal(other, sums[0])


def test_a_norm_beyond_float64_is_infinite():
    assert NumbaKernels(1).sums_of_squares([np.full(3 * TILE, 7e151)]) == np.inf


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n", [0, 1000, ALONE, 3 * TILE + 1])
@pytest.mark.parametrize("scaled", ["", "whole", "pieces"])
@pytest.mark.parametrize("decay", [0.0, 3e-4])
@pytest.mark.parametrize("shared", ["", "whole", "pieces"])
def test_step_ahead_equals_the_operators_bit_for_bit(threads, n, scaled, decay, shared):
    kernels, reference = NumbaKernels(threads), ReferenceKernels()
    rng = np.random.default_rng(n)
    p, theta, a = rng.normal(size=(3, n)).astype(np.float32)
    expected, before = p.copy(), p.copy()

    def drawn(kind, low, high):
        count = 1 if kind == "whole" else -(-n // PIECE)
        drawn = rng.uniform(low, high, count).astype(np.float32) if kind else None
        each = 1.0 if drawn is None else np.resize(np.repeat(drawn, n if count == 1 else PIECE), n).astype(float)
        return drawn, each

    (factors, factor), (shares, share) = drawn(scaled, 1, 4), drawn(shared, 0.25, 1)
    kernels.take_update(p, theta, a, shares, factors, decay)
    reference.take_update(expected, theta, a, shares, factors, decay)
    np.testing.assert_array_equal(p, expected)
    wanted = factor * (before - theta - a * share) + (factor - 1) * decay * theta
    np.testing.assert_allclose(p, wanted, atol=1e-5)
    kernels.put(p, theta, a, shares)
    reference.put(expected, theta, a, shares)
    np.testing.assert_array_equal(p, expected)
    np.testing.assert_allclose(p, theta + a * share, atol=1e-6)
    assert not kernels.is_elsewhere(p, theta, a, shares)
    assert not reference.is_elsewhere(p, theta, a, shares)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("position", [0, 15, 32767, 32768, 69999])
@pytest.mark.parametrize("change", [lambda x: np.nextafter(x, np.float32(9)), lambda x: np.nan])
def test_one_edit_anywhere_is_seen(threads, position, change):
    theta, a = np.random.default_rng(0).normal(size=(2, 70_000)).astype(np.float32)
    for kernels in (NumbaKernels(threads), ReferenceKernels()):
        p = theta + a
        p[position] = change(p[position])
        assert kernels.is_elsewhere(p, theta, a, None)
