"""What messages of scales and codes have in common: their forms say their lengths, and moments give the spread."""

import math

import numpy as np
import pytest
from contract_tools import Alone, Case
from hypothesis import given
from hypothesis import strategies as st

from dgc.core.compressors.quantizers import TILE, magnitude_and_deviation, tiles_of

SHAPES = {"a": (31, 9), "b": (6, 5, 3, 3), "c": (70,), "d": (1,)}
CASES = [
    Case("onebit"), Case("onebit", {"means": "row"}), Case("onebit", {"means": "tensor"}),
    Case("qsgd"), Case("qsgd", {"bits": 2, "bucket_size": 7}), Case("terngrad"),
    *[Case("dorefa", {"bits": bits}) for bits in range(1, 9)],
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forms_say_where_a_message_ends(case):
    alone = Alone(case, SHAPES)
    _, count, used = alone.encode(alone.random())
    assert count == sum(math.prod(s) for s in SHAPES.values())
    assert used == sum(-(-alone.algorithm.form(t).bytes(t.n) // 8) * 8 for t in alone.tensors)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_codes_lie_behind_the_scales(case):
    """Five to a byte in terngrad."""
    alone = Alone(case, {"a": (31, 9)})
    (tensor,) = alone.tensors
    form = alone.algorithm.form(tensor)
    message, _, _ = alone.encode(alone.random())
    scales = message[: 4 * form.scales].view(np.float32)
    assert np.isfinite(scales).all()
    assert scales.any()
    bits = 1 if case.name == "onebit" else getattr(alone.algorithm.options, "bits", None)
    assert form.bytes(tensor.n) - scales.nbytes == (56 if bits is None else -(-279 * bits // 8))


@given(
    n=st.sampled_from([1, 2, TILE - 1, TILE, TILE + 1, 3 * TILE + 5]),
    mean=st.sampled_from([0.0, 1.0, -1e6]),
    seed=st.integers(0, 99),
)
def test_the_spread_from_moments_is_numpys(n, mean, seed):
    x = mean + np.random.default_rng(seed).standard_normal(n)
    parts = [x[i : i + TILE] for i in range(0, n, TILE)]
    assert len(parts) == tiles_of(n)
    moments = np.array([(np.abs(p).max(), p.sum(), ((p - p.mean()) ** 2).sum()) for p in parts])
    largest, deviation = magnitude_and_deviation(moments, n)
    assert largest == np.abs(x).max()
    assert deviation == pytest.approx(np.std(x), rel=1e-8, abs=1e-12)


def test_tiles_are_added_up_in_turn():
    """Their order is part of the result's bits, and NumPy's own sum has another one."""
    moments = np.random.default_rng(0).standard_normal((300, 3)) ** 2
    n, total, squares, about = 300 * TILE, 0.0, 0.0, 0.0
    for _, each, _ in moments:
        total += each
    for _, each, square in moments:
        apart = each / TILE - total / n
        squares += square
        about += TILE * apart * apart
    assert magnitude_and_deviation(moments, n)[1] == np.sqrt((squares + about) / n)


def test_a_spread_beyond_float64_is_infinite():
    assert magnitude_and_deviation(np.array([[1e200, 0.0, np.inf]]), 5) == (1e200, np.inf)
