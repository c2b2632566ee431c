"""Small tensors as bytes: what is read and what is lost add up, tensors keep to themselves, and padding stays out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc.core.codecs import SmallCodec
from dgc.core.compressors import make_config
from dgc.core.layout import Parameter, make_layout
from dgc.errors import WireError


def coder(lengths, name="int8"):
    """A codec of 1-D tensors of these lengths, and the bucket."""
    specs = [Parameter("w", (64, 64), "float32"), *(Parameter(f"b{i}", (n,), "float32") for i, n in enumerate(lengths))]
    (bucket,) = make_layout(specs, make_config({})).buckets
    return SmallCodec(bucket, name), bucket


def filled(bucket):
    """Small tensors that have elements, in the order of the bucket."""
    return [s for s in bucket.small if s.length]


def spread(bucket, tensors):
    """Tensors, in the order of the bucket, at their places."""
    x = np.zeros(bucket.small_size, np.float32)
    for segment, values in zip(filled(bucket), [t for t in tensors if len(t)], strict=True):
        first = segment.offset - bucket.sparse_size
        x[first : first + segment.length] = values
    return x


def coded(codec, x):
    """The block, what is lost, and what is read."""
    out, left, read = np.full(codec.max_bytes, 0xAA, np.uint8), np.full(x.size, 7, np.float32), np.zeros_like(x)
    codec.encode(x, out, left)
    codec.add(out, read)
    return out, left, read


finite = st.floats(-(2.0**127), 2.0**127, width=32)
tensors = st.lists(st.lists(finite, min_size=0, max_size=40), min_size=0, max_size=5)


@settings(max_examples=120, deadline=None)
@given(tensors, st.sampled_from(["float16", "int8", "int4", "int3", "int2"]))
def test_a_block_is_the_value_codecs_own_and_what_is_lost_is_kept(values, name):
    """Groups that lie apart and groups side by side."""
    values = [np.array(v, np.float32) for v in values]
    codec, bucket = coder([v.size for v in values], name)
    x = spread(bucket, reversed(values))  # buckets take parameters from the end
    block, left, read = coded(codec, x)
    ranges = [s.offset - bucket.sparse_size + np.arange(s.length) for s in filled(bucket)]
    places = np.concatenate([np.empty(0, int), *ranges])
    bounds = np.cumsum([0, *(s.length for s in filled(bucket))])
    wanted = np.empty(codec.values.max_bytes(places.size, bounds.size - 1), np.uint8)
    codec.values.encode(x[places], bounds, wanted)
    decoded = np.zeros_like(x)
    decoded[places] = codec.values.decode(wanted, places.size, bounds)[0]
    np.testing.assert_array_equal(block, wanted if places.size else [])
    np.testing.assert_array_equal(read, decoded)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(left, x - decoded)


def test_a_damaged_block_is_refused_before_anything_is_added():
    codec, bucket = coder([9])
    block, _, _ = coded(codec, spread(bucket, [np.arange(9)]))
    block[8 + 4] = 0x80
    sums = np.ones(bucket.small_size, np.float32)
    with pytest.raises(WireError, match="an entry is -128"):
        codec.add(block, sums)
    np.testing.assert_array_equal(sums, 1)


def test_an_infinite_scale_makes_its_own_tensor_not_finite():
    codec, bucket = coder([4, 4])
    block, _, _ = coded(codec, spread(bucket, [np.ones(4), np.ones(4)]))
    block[:4].view(np.float32)[0] = np.inf
    sums = np.zeros(bucket.small_size, np.float32)
    codec.add(block, sums)
    assert np.isfinite(sums).tolist() == [False] * 4 + [True] * (sums.size - 4)
