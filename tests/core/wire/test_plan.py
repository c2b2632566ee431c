"""Bytes on the wire: what a whole model's messages weigh, and when a dense sum is cheaper."""

import pytest
from model_shapes import resnet50_shapes

from dgc.core.compressors.build import make_config
from dgc.core.state.layout import Parameter, make_layout
from dgc.core.wire.plan import Mode, make_plan


def plans(density, ranks, **options):
    config = make_config(options)
    layout = make_layout([Parameter(n, s, "float32") for n, s in resnet50_shapes()], config)
    made = [
        make_plan(b, density=density, ranks=ranks, indices=config.indices, values=config.values) for b in layout.buckets
    ]
    return layout, made


def test_a_25_million_element_model_sends_at_most_33_bits_per_entry():
    layout, made = plans(0.001, 8)
    assert sum(len(b.sparse) for b in layout.buckets) == 54
    assert layout.sparse_numel == pytest.approx(25.5e6, rel=0.01)
    entries = sum(sum(p.ks) for p in made)
    bits = 8 * sum(p.message_bytes - p.inline_bytes for p in made) / entries
    assert entries == pytest.approx(25_500, rel=0.01)
    assert bits <= 33, f"{bits:.2f} bits"
    dense = 4 * layout.numel
    assert dense / sum(p.message_bytes for p in made) > 300


def test_a_dense_sum_is_chosen_where_it_is_cheaper():
    """75 % sparsity on 32 ranks is 8 times a dense exchange as messages, and one dense exchange as a sum."""
    assert {p.mode for p in plans(0.25, 32)[1]} == {Mode.SUM}
    assert {p.mode for p in plans(0.25, 2)[1]} == {Mode.SPARSE}
    assert {p.mode for p in plans(0.001, 32)[1]} == {Mode.SPARSE}
    assert {p.mode for p in plans(None, 2)[1]} == {Mode.DENSE}


def test_plans_never_lose_an_element():
    for density in (None, 0.25, 0.001):
        for ranks in (2, 5, 64):
            layout, made = plans(density, ranks)
            for bucket, plan in zip(layout.buckets, made, strict=True):
                dense = sum(s.length for s in bucket.dense)
                assert plan.vector_size >= dense
                assert plan.vector_start + plan.vector_size == bucket.size
                assert plan.message_bytes >= 64 + plan.payload_bytes + plan.inline_bytes or plan.message_bytes == 256
