"""Whole payloads: what a sender keeps of its values is what receivers read, and no old byte stays in them."""

import numpy as np
import pytest

from dgc.core.codecs import SparseCodec
from dgc.core.layout import Bucket, Segment


@pytest.mark.parametrize("values", ["float16", "float32", "int8"])
@pytest.mark.parametrize("indices", ["uint16", "int32", "auto"])
def test_a_sender_knows_what_receivers_read(indices, values):
    n, rng = 200_000, np.random.default_rng(0)
    bucket = Bucket(0, "float32", (Segment(0, 0, n // 2), Segment(1, n // 2, n // 2)), (), n, n)
    positions = np.flatnonzero(rng.random(n) < 0.01)
    given = rng.standard_normal(positions.size).astype(np.float32)
    codec = SparseCodec(bucket, positions.size + 50, indices, values)
    payload = np.full(codec.max_bytes, 7, np.uint8)
    sent = codec.encode(positions, given, payload)
    again = np.zeros(codec.max_bytes, np.uint8)
    codec.encode(positions, given, again)
    np.testing.assert_array_equal(payload, again)
    found = codec.decode(payload, positions.size)
    np.testing.assert_array_equal(found[0], positions)
    np.testing.assert_array_equal(found[1], sent)
    np.testing.assert_allclose(sent, given, atol=0.02)
