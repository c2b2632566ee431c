"""The default codecs write and read the same bytes with Numba and without."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from kernel_tools import run_script

from dgc.core.wire.codecs import float_values, indices
from dgc.core.wire.codecs.float_values import Float16Values
from dgc.core.wire.codecs.indices import Uint16Indices
from dgc.core.wire.codecs.loops import default_loops

CODEC, BOUNDS = Float16Values(), np.array([0], np.int64)


def both_ways(module, call):
    """What ``call`` returns with the Numba loops and without."""
    assert default_loops() is not None
    fast = call()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "default_loops", lambda: None)
        return fast, call()


def encoded(values):
    out = np.full(CODEC.max_bytes(values.size, 0) + 8, 7, np.uint8)
    assert CODEC.encode(values, BOUNDS, out) == out.size - 8
    return out


def decoded(data, count):
    return CODEC.decode(data, count, BOUNDS)[0].view(np.uint32)


def check(values):
    fast, slow = both_ways(float_values, lambda: encoded(values))
    np.testing.assert_array_equal(fast, slow)
    np.testing.assert_array_equal(*both_ways(float_values, lambda: decoded(slow, values.size)))


@settings(max_examples=300, deadline=None)
@given(arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32)))
def test_any_float32(values):
    check(values)


@pytest.mark.parametrize("scale", [2.0**e for e in (-149, -140, -126, -112, -98, -30, 0, 30, 98, 99, 111, 112)])
def test_every_half_its_ties_and_its_neighbours(scale):
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (halves[1:] + halves[:-1]) / 2
    around = [np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))]
    with np.errstate(over="ignore", under="ignore"):
        values = np.concatenate([halves, ties, *around]) / np.float32(65536) * np.float32(scale)
    check(np.concatenate([values, -values]))


def test_every_half_is_read_alike_infinities_and_nans_too():
    data = np.zeros(8 + 2 * 65536, np.uint8)
    data[8:] = np.arange(65536, dtype=np.uint16).view(np.uint8)
    for exponent in (-163, -127, -126, -20, 0, 113):
        data[:4].view(np.int32)[0] = exponent
        np.testing.assert_array_equal(*both_ways(float_values, lambda: decoded(data, 65536)))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300_000), st.integers(0, 2**32), st.floats(0, 0.3))
def test_positions(n, seed, density):
    positions = np.flatnonzero(np.random.default_rng(seed).random(n) < density)
    codec = Uint16Indices()

    def write():
        out = np.full(codec.max_bytes(n, positions.size) + 8, 7, np.uint8)
        assert codec.encode(positions, n, out) == out.size - 8
        return out

    fast, slow = both_ways(indices, write)
    np.testing.assert_array_equal(fast, slow)
    np.testing.assert_array_equal(codec.decode(fast, n, positions.size)[0], positions)


def test_codecs_work_where_numba_does_not():
    done = run_script(
        """
        import numpy as np
        from dgc.core.wire import index_codec, value_codec
        from dgc.core.wire.codecs.loops import default_loops
        out = np.zeros(64, np.uint8)
        value_codec("float16").encode(np.ones(3, np.float32), np.zeros(1, np.int64), out)
        assert value_codec("float16").decode(out, 3, np.zeros(1, np.int64))[0].tolist() == [1, 1, 1]
        codec = index_codec("uint16")
        codec.encode(np.arange(3), 10, out)
        assert codec.decode(out, 10, 3)[0].tolist() == [0, 1, 2]
        assert default_loops() is None
        """,
        NUMBA_DISABLE_JIT="1",
    )
    assert done.returncode == 0, done.stderr
