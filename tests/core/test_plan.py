"""Bytes on the wire: what a whole model's messages weigh, and when a dense sum is cheaper."""

import json
import math
from pathlib import Path

import pytest
from model_shapes import resnet50_shapes

from dgc.core.compressors import make_config
from dgc.core.exchange.choice import entry_plan
from dgc.core.layout import Parameter, make_layout


def plans(density, ranks, **options):
    config = make_config({"indices": "uint16", "values": "float16", "small": "int8", **options})
    layout = make_layout([Parameter(n, s, "float32") for n, s in resnet50_shapes()], config)
    return layout, [entry_plan(b, config, density, ranks, has_alltoall=False) for b in layout.buckets]


def test_a_25_million_element_model_sends_at_most_33_bits_per_entry():
    layout, made = plans(0.001, 8)
    assert sum(len(b.sparse) for b in layout.buckets) == 54
    assert layout.sparse_numel == pytest.approx(25.5e6, rel=0.01)
    entries = sum(p.form.count for p in made)
    bits = 8 * sum(p.form.nbytes - p.form.coded_bytes - p.form.inline_bytes for p in made) / entries
    assert entries == pytest.approx(25_500, rel=0.01)
    assert bits <= 33, f"{bits:.2f} bits"
    dense = 4 * layout.numel
    assert dense / sum(p.form.nbytes for p in made) > 600
    assert dense / sum(p.form.nbytes for p in plans(0.001, 8, small="float32")[1]) > 300


def test_a_dense_sum_is_chosen_where_it_is_cheaper():
    """75 % sparsity on 32 ranks is 8 times a dense exchange as messages, and one dense exchange as a sum."""
    assert {p.way for p in plans(0.25, 32)[1]} == {"dense sum"}
    assert {p.way for p in plans(0.25, 2)[1]} == {"gathered"}
    assert {p.way for p in plans(0.001, 32)[1]} == {"gathered"}
    assert {p.way for p in plans(None, 2)[1]} == {"dense sum"}


def test_plans_never_lose_an_element():
    for density in (None, 0.25, 0.001):
        for ranks in (2, 5, 64):
            layout, made = plans(density, ranks)
            for bucket, plan in zip(layout.buckets, made, strict=True):
                vector, form = plan.vector, plan.form
                assert vector.size == (bucket.size if plan.way == "dense sum" else bucket.size - bucket.sparse_size)
                coded = bucket.small_size if plan.small_codecs else 0
                assert vector.plain_bytes == vector.itemsize * (vector.size - coded)
                assert form.inline_bytes in (0, vector.plain_bytes)
                parts = form.payload_bytes + form.coded_bytes + form.inline_bytes
                assert form.nbytes == max(256, 64 + parts)


def test_small_tensors_are_coded_where_that_moves_fewer_bytes():
    for ranks, coded in ((2, True), (8, True), (32, False)):
        layout, made = plans(0.001, ranks)
        for bucket, plan in zip(layout.buckets, made, strict=True):
            assert bool(plan.small_codecs) is coded
            assert plan.form.coded_bytes < 1.1 * sum(s.length for s in bucket.dense)
            assert plan.vector.is_inline is coded


def test_what_a_user_named_stays_exact_beside_what_is_coded():
    layout, made = plans(0.001, 2, exclude=("*.conv1.bn.*", "fc.bias"))
    assert sum(len(b.small) for b in layout.buckets) < sum(len(b.dense) for b in layout.buckets)
    for bucket, plan in zip(layout.buckets, made, strict=True):
        exact = [s for s in bucket.dense if s not in bucket.small]
        assert all(s.offset >= bucket.sparse_size + bucket.small_size for s in exact)
        assert plan.form.inline_bytes == 4 * (bucket.size - bucket.sparse_size - bucket.small_size)


@pytest.mark.parametrize(
    ("shape", "density", "ranks", "way", "sums"),
    [
        ((2000, 2000), 0.05, 8, "gathered", None),
        ((2000, 2000), 0.05, 12, "gathered", None),  # owners would move 0.67 of the bytes
        ((2000, 2000), 0.05, 16, "owners", "int4"),
        ((2000, 2000), 0.001, 8, "gathered", None),
        ((2000, 2000), 0.001, 16, "gathered", None),  # a second collective costs more than the bytes that it saves
        ((2000, 2000), 0.001, 64, "owners", "int4"),
        ((2000, 2000), 0.001, 1024, "owners", "int8"),  # four sums an owner: eight means would be longer
        ((64, 32), 0.05, 64, "gathered", None),  # two headers
        ((2000, 2000), 0.05, 1, "gathered", None),
    ],
)
def test_owners_add_up_where_that_saves_enough_bytes(shape, density, ranks, way, sums):
    config = make_config({})
    (bucket,) = make_layout([Parameter("a", shape, "float32")], config).buckets
    plan = entry_plan(bucket, config, density, ranks)
    assert plan.way == way
    if plan.way == "owners":
        assert plan.second[0].values.name == sums
        assert plan.ks[0] == math.ceil(8 * plan.encoder.ks[0] / ranks)
    gathered = entry_plan(bucket, make_config({"exchange": "gather"}), density, ranks)
    assert plan.way == "gathered" or plan.traffic.cost <= 0.6 * gathered.traffic.cost
    for other in (gathered, entry_plan(bucket, config, density, ranks, has_alltoall=False)):
        assert other.way == "gathered"


MEASURED = json.loads((Path(__file__).parents[2] / "benchmarks/results/many-ranks-time.json").read_text())["rows"]


@pytest.mark.parametrize("percent", ["0.1", "5"])
@pytest.mark.parametrize("rate", ["1gbit", "100mbit"])
def test_the_chosen_way_was_the_faster_one_where_both_were_measured(percent, rate):
    """An MLP of three layers, ``mlp-4m`` in benchmarks/training/models.py, in one bucket."""
    seconds = {row["method"]: row["seconds"] for row in MEASURED if row["rate"] == rate}
    faster = "owners" if seconds[f"auto-{percent}"] < seconds[f"gather-{percent}"] else "gathered"
    ranks, config = MEASURED[0]["ranks"], make_config({})
    shapes = [(1440, 1024), (1440,), (1440, 1440), (1440,), (600, 1440), (600,)]
    layout = make_layout([Parameter(str(i), shape, "float32") for i, shape in enumerate(shapes)], config)
    assert layout.numel == MEASURED[0]["parameters"]
    assert {entry_plan(b, config, float(percent) / 100, ranks).way for b in layout.buckets} == {faster}


@pytest.mark.parametrize("values", ["int2", "int3", "int4"])
def test_sums_of_coarse_values_take_the_shorter_code(values):
    """Of four sums an owner, eight means would be longer than one scale."""
    config = make_config({"values": values})
    (bucket,) = make_layout([Parameter("a", (2000, 2000), "float32")], config).buckets
    assert entry_plan(bucket, config, 0.001, 1024).second[0].values.name == "int8"
