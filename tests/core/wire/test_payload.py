"""Whole payloads: one loop writes what the codecs write one after the other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dgc.core.state.layout import Bucket, Segment
from dgc.core.wire import payload
from dgc.core.wire.payload import SparseCodec, encode_default


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
