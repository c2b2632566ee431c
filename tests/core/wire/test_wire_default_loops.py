"""The default codecs write and read the same bytes with Numba and without."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dgc.core.state.layout import Bucket, Segment
from dgc.core.wire import payload
from dgc.core.wire.codecs import float_values, indices
from dgc.core.wire.codecs.float_values import Float16Values
from dgc.core.wire.codecs.indices import Uint16Indices
from dgc.core.wire.codecs.loops import default_loops
from dgc.core.wire.payload import SparseCodec, encode_default

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


def message_both_ways(positions, values, n):
    """The payload and the decoded values of the default codecs, in one loop and by one codec after the other."""
    bucket = Bucket(0, "float32", (Segment(0, 0, n),), (), n, n)
    codec = SparseCodec(bucket, positions.size, "uint16", "float16")

    def write():
        out = np.full(codec.max_bytes + 16, 7, np.uint8)
        return out, codec.encode(positions, values, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload, "encode_default", lambda *_: None)
        slow = write()
    return write(), slow


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 200_000))
def test_whole_messages(data, n):
    seed, density = data.draw(st.integers(0, 2**32)), data.draw(st.sampled_from([0.0, 1e-4, 0.01, 0.3, 1.0]))
    chosen = np.random.default_rng(seed).random(n) < density
    chosen[-1] = True  # a message of no entries is never encoded
    positions = np.flatnonzero(chosen)
    few = data.draw(arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32)))
    fast, slow = message_both_ways(positions, np.resize(few, positions.size), n)
    np.testing.assert_array_equal(fast[0], slow[0])
    np.testing.assert_array_equal(fast[1].view(np.uint32), slow[1].view(np.uint32))


def test_usual_messages_take_the_one_loop():
    positions, values = np.arange(0, 100_000, 7), np.linspace(-1, 1, 14_286, dtype=np.float32)
    out = np.zeros(100_000, np.uint8)
    used, decoded = encode_default(positions, values, 100_000, out)
    assert used == 8 + 2 * 14_286 + 4 + 8 + 2 * 14_286 + 4
    np.testing.assert_allclose(decoded, values, atol=2**-11)


@pytest.mark.parametrize(
    "change",
    [
        {"values": np.array([1, np.inf], np.float32)},
        {"values": np.zeros(2, np.float32)},
        {"values": np.ones(2, np.float64)},
        {"values": np.ones(3, np.float32)},
        {"values": np.ones(4, np.float32)[::2]},
        {"positions": np.array([1, 2], np.int32)},
        {"positions": np.array([1, 200])},
        {"out": np.zeros(31, np.uint8)},
    ],
    ids=["infinite", "zeros", "float64", "another count", "strided", "int32", "beyond the bucket", "too little room"],
)
def test_others_are_left_to_the_codecs(change):
    given = {"positions": np.array([1, 2]), "values": np.ones(2, np.float32), "n": 100, "out": np.zeros(40, np.uint8)}
    assert encode_default(**given) is not None
    assert encode_default(**{**given, **change}) is None
