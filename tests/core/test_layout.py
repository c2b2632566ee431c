"""Buckets and segments: every parameter has a place of its own."""

import numpy as np
import pytest
from model_shapes import resnet50_shapes

from dgc.core.compressors import make_config
from dgc.core.layout import Parameter, make_layout
from dgc.errors import LayoutError


def test_bad_parameters_are_refused():
    config = make_config({})
    for bad in (
        [],
        [Parameter("a", (2,), "float32")] * 2,
        [Parameter("a", (2,), "int64")],
        [Parameter("a", (2**31,), "float32")],
    ):
        with pytest.raises(LayoutError):
            make_layout(bad, config)


def test_segments_do_not_overlap_and_every_parameter_has_a_place():
    config = make_config({"bucket_bytes": 2**20})
    layout = make_layout([Parameter(n, s, "float32") for n, s in resnet50_shapes()], config)
    assert sorted(layout.places) == list(range(161))
    for bucket in layout.buckets:
        taken = np.zeros(bucket.size, np.int8)
        for segment in bucket.segments:
            taken[segment.slice] += 1
        assert taken.max() <= 1
    order = [s.parameter for b in layout.buckets for s in b.segments]
    assert order[0] > order[-1], "buckets follow the backward pass"


@pytest.mark.parametrize("numel", [2**30, 2**31 - 17, 2**20 + 1])
def test_positions_in_a_bucket_fit_32_bits_whatever_size_is_asked_for(numel):
    """Kernels and messages count positions as int32; the padding between tensors counts."""
    sizes = [Parameter(f"p{i}", (numel // 3, 3), "float32") for i in range(2**32 // numel + 2)]
    layout = make_layout(sizes, make_config({"bucket_bytes": 2**50}))
    assert len(layout.buckets) > 1
    assert all(bucket.size < 2**31 for bucket in layout.buckets)
    assert sum(len(bucket.segments) for bucket in layout.buckets) == len(sizes)
