"""Bytes on the wire: what a whole model's messages weigh, and when a dense sum is cheaper."""

import numpy as np
import pytest

from dgc.core.compressors.build import make_config
from dgc.core.config.schedule import Schedule, entries_to_send
from dgc.core.state.layout import Parameter, make_layout
from dgc.core.wire.plan import Mode, make_plan


def resnet50_shapes():
    """(name, shape) of ResNet-50's 161 tensors: 25.6 M elements, 54 tensors of two or more dimensions."""
    shapes = [("conv1.weight", (64, 3, 7, 7)), ("bn1.weight", (64,)), ("bn1.bias", (64,))]
    inputs = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            name, outputs = f"layer{stage}.{block}", 4 * width
            convs = [
                ("conv1", (width, inputs, 1, 1)),
                ("conv2", (width, width, 3, 3)),
                ("conv3", (outputs, width, 1, 1)),
            ]
            if block == 0:
                convs.append(("downsample", (outputs, inputs, 1, 1)))
            for conv, shape in convs:
                shapes += [(f"{name}.{conv}.weight", shape)]
                shapes += [(f"{name}.{conv}.bn.{part}", shape[:1]) for part in ("weight", "bias")]
            inputs = outputs
    return [*shapes, ("fc.weight", (1000, 2048)), ("fc.bias", (1000,))]


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


def test_segments_do_not_overlap_and_every_parameter_has_a_place():
    layout, _ = plans(0.001, 2, bucket_bytes=2**20)
    assert sorted(layout.places) == list(range(161))
    for bucket in layout.buckets:
        taken = np.zeros(bucket.size, np.int8)
        for segment in bucket.segments:
            taken[segment.slice] += 1
        assert taken.max() <= 1
    order = [s.parameter for b in layout.buckets for s in b.segments]
    assert order[0] > order[-1], "buckets follow the backward pass"


def test_schedule_is_paddles_table():
    five = (0.75, 0.9375, 0.984375, 0.996, 0.999)
    schedule = Schedule(five, begin=0, length=100)
    expected = [five[min(step // 20, 4)] for step in range(120)]
    assert [round(1 - schedule.density(step), 9) for step in range(120)] == [round(s, 9) for s in expected]
    one_each = Schedule(five, begin=3, length=5)
    assert [one_each.is_dense(s) for s in range(4)] == [True, True, True, False]
    assert [round(1 - one_each.density(3 + s), 9) for s in range(7)] == [*(round(s, 9) for s in five), 0.999, 0.999]
    assert one_each.ramp_end() == 7
    jump = Schedule((0.5, 0.9), begin=0, length=1)
    assert (jump.density(0), round(jump.density(1), 9)) == (0.5, 0.1)


def test_k_is_what_a_reader_computes_by_hand():
    assert entries_to_send(1000, 1 - 0.999) == 1
    assert entries_to_send(1000, 1 - 0.9) == 100
    assert entries_to_send(2000, 1 - 0.999) == 2
    assert entries_to_send(10, 0.001) == 1
    assert entries_to_send(0, 0.5) == 0
    assert entries_to_send(7, 1.0) == 7
