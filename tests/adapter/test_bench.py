"""What ``python -m dgc bench`` measures and says, on ranks that are threads and in a real launch."""

import argparse
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from dgc.__main__ import main
from dgc.contrib import bench
from dgc.contrib.bench import Costs, Found, Link, Training, measure, predict, traffic_of, training_of
from dgc.core.compressors import make_config
from dgc.core.config import Schedule
from dgc.core.layout import Parameter, make_layout
from dgc.errors import ConfigError
from dgc.transport.local import run_ranks


def arguments(**options):
    given = {"parameters": 4_000_000, "model": None, "sparsity": None, "steps": 1000, "optimizer": "sgd"}
    return argparse.Namespace(**{**given, "classic": False, "bandwidth": None, "latency": None, **options})


@pytest.mark.parametrize(
    ("costs", "advice"),
    [
        (Costs(dense=9.0, half=5.0, sparse=(1.0,)), "compression=dgc.Compression.dgc(steps=1000)"),
        (Costs(dense=9.0, half=5.0, sparse=(6.0,)), "compression=dgc.Compression.fp16"),
        (Costs(dense=1.05, half=1.0, sparse=(3.0,)), "stay dense"),
    ],
    ids=["slow", "medium", "fast"],
)
def test_the_fastest_way_is_advised_and_dense_unless_a_tenth_is_saved(costs, advice):
    assert costs.advice(training_of(arguments())).startswith(advice)


def test_the_ramp_up_counts_by_its_steps():
    """It is a fifth of a training with AdamW and classic error feedback."""
    training = training_of(arguments(optimizer="adamw", classic=True))
    advice = 'compression=dgc.Compression.dgc(steps=1000, error_feedback="classic")'
    assert Costs(9.0, 5.0, (12.0, 3.0)).advice(training) == advice
    assert Costs(9.0, 5.0, (14.0, 3.0)).advice(training).startswith("compression=dgc.Compression.fp16")


@pytest.mark.parametrize("classic", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("steps", [1, 60, 5000, 200_000])
def test_it_measures_what_the_training_would_do(steps, optimizer, classic):
    config = make_config({"steps": steps}).suited(optimizer == "adamw", steps_ahead=not classic)
    schedule = Schedule(config.on_ranks(2).sparsities, config.rampup_begin_step, config.rampup_step)
    training = training_of(arguments(steps=steps, optimizer=optimizer, classic=classic))
    assert training.config.steps_ahead == config.steps_ahead
    assert (training.config.values, training.config.small) == (config.values, config.small)
    expected = [schedule.density(step) for step in range(steps)]
    found = [phase.density for phase in training.phases for _ in range(phase.steps)]
    assert found == pytest.approx(expected)
    said = ', error_feedback="classic"' if classic and optimizer == "adamw" else ""
    assert training.option == f"steps={steps}{said}"


def test_with_step_ahead_more_ranks_send_more():
    training = training_of(arguments(optimizer="adamw"))
    assert training.on_ranks(2) == training
    assert training.on_ranks(8).densities == pytest.approx([0.05, 0.05])
    layout = make_layout([Parameter("0", (1024, 4096), "float32")], training.config)
    two, eight = (traffic_of(layout, training, ranks) for ranks in (2, 8))
    assert eight[2, 2] == pytest.approx(4 * 0.05 / 0.02 * two[2, 2], rel=0.01), "of four times the ranks, gathered"
    classic = training_of(arguments())
    assert classic.on_ranks(8).config == classic.config


def test_a_sparsity_of_which_the_library_warns_is_refused():
    with pytest.raises(ConfigError, match="too few entries for AdamW"):
        training_of(arguments(sparsity=0.999, optimizer="adamw"))
    assert training_of(arguments(sparsity=0.999)).option == "sparsity=0.999"
    assert training_of(arguments(sparsity=0.95, optimizer="adamw")).option == "sparsity=0.95"


@pytest.mark.parametrize("classic", [False, True])
@pytest.mark.parametrize("elements", [1, 100_000])
def test_all_ranks_measure_the_same(elements, classic):
    training = training_of(arguments(optimizer="adamw", classic=classic))
    one, other = run_ranks(2, lambda transport: measure(transport, elements, training))
    assert one == other
    assert min(one.costs.dense, one.gathered, one.applied, one.link.a_round, *one.costs.sparse) > 0
    assert one.link.a_byte >= 0
    assert len(one.costs.sparse) == len(training.phases) == 2
    assert one.applied < one.gathered  # of the same steps, so this holds on any machine
    assert 0 <= one.costs.half <= one.costs.dense


def test_a_larger_model_costs_as_many_times_more(monkeypatch):
    monkeypatch.setattr(bench, "_ROWS", 16)
    monkeypatch.setattr(bench, "_median", lambda step: step() or 1.0)
    training = training_of(arguments())
    for factor in (1, 1000):
        (found, _) = run_ranks(2, lambda transport, n=factor * 16 * 1024: measure(transport, n, training))
        assert found[:2] == (Costs(factor, factor, (factor,)), factor)
        assert found.link.a_round == 1.0, "a round takes as long for every model"


# -- other numbers of ranks --------------------------------------------------------------------------------------------

FOUND = Found(Costs(dense=1.0, half=0.6, sparse=(9.0, 0.4)), gathered=0.5, applied=0.1, link=Link(1e-3, 1e-6))


def load(dense, gathered, owners):
    """Return the traffic of a dense step, one in 16 bits, a gathered one, and two phases with owners."""
    return np.array([dense, np.array(dense) * [1, 0.5, 1], gathered, owners, owners])


def seconds(row):
    costs, gathered = row
    return [costs.dense, costs.half, gathered, costs.sparse[-1]]


FOUR = load([6, 200_000, 0], [3, 50_000, 1000], [6, 60_000, 1500])
EIGHT = load([14, 250_000, 0], [7, 100_000, 2000], [14, 70_000, 1600])


def test_a_prediction_is_a_fixed_time_and_prices_of_rounds_bytes_and_entries():
    """On 4 ranks: 0.206 s of collectives dense, 0.053 s gathered, 0.066 s with owners; and 0.1 s for 1000 entries."""
    rows = predict(FOUND, 4, {4: FOUR, 8: EIGHT})
    assert seconds(rows[4]) == pytest.approx([1.0, 0.6, 0.5, 0.4]), "as measured"
    assert seconds(rows[8]) == pytest.approx(
        [
            1.0 - 0.206 + 0.264,
            0.6 - 0.106 + 0.139,
            0.5 - 0.053 - 0.1 + 0.107 + 0.2,
            0.4 - 0.066 - 0.15 + 0.084 + 0.16,
        ]
    )
    assert rows[8][0].sparse[0] == pytest.approx(9.0 - 0.066 - 0.15 + 0.084 + 0.16), "the ramp-up"


def test_a_network_that_the_user_describes_takes_the_place_of_the_measured_one():
    rows = predict(FOUND, 4, {4: FOUR, 8: EIGHT}, Link(2e-3, 3e-6))
    assert seconds(rows[4])[:2] == pytest.approx([1.0 - 0.206 + 0.612, 0.6 - 0.106 + 0.312])
    assert seconds(rows[8])[:2] == pytest.approx([1.0 - 0.206 + 0.778, 0.6 - 0.106 + 0.403])
    faster = predict(FOUND, 4, {4: FOUR, 8: EIGHT}, Link(1e-6, 1e-9))
    assert seconds(faster[4]) == pytest.approx([1.0, 0.6, 0.5, 0.4]), "no faster than what was measured"


@pytest.mark.parametrize(
    ("bandwidth", "latency", "link"),
    [
        (None, None, None),
        ("1gbit", "200us", (2e-4, 8e-9)),
        ("100 Mbit/s", "0.5 ms", (5e-4, 8e-8)),
        ("64kbit", "1MS", (1e-3, 1.25e-4)),
    ],
)
def test_a_network_is_described_by_bandwidth_and_latency(bandwidth, latency, link):
    assert Link.described(bandwidth, latency) == (None if link is None else pytest.approx(link))


@pytest.mark.parametrize(
    ("bandwidth", "latency", "option"),
    [
        ("1gbit", None, "--latency is None"),
        (None, "200us", "--bandwidth is None"),
        ("1", "200us", "--bandwidth is 1"),
        ("1GB", "200us", "--bandwidth is 1GB"),
        ("0gbit", "200us", "--bandwidth is 0gbit"),
        ("1.2.3gbit", "200us", "--bandwidth is 1.2.3gbit"),
        ("1gbit", "-1us", "--latency is -1us"),
    ],
)
def test_half_a_network_or_a_wrong_unit_is_an_error(bandwidth, latency, option):
    with pytest.raises(ConfigError, match=f"{option}; .* give "):
        Link.described(bandwidth, latency)


def test_if_all_buckets_are_gathered_the_times_are_those_of_gathering():
    few = load([2, 200, 0], [1, 50, 1000], [1, 50, 1000])
    many = load([14, 250, 0], [7, 100, 2000], [14, 70, 1600])
    rows = predict(FOUND, 2, {2: few, 8: many})
    assert seconds(rows[2]) == pytest.approx([1.0, 0.6, 0.4, 0.4])
    fixed = 0.4 - 0.00105 - 0.1
    assert seconds(rows[8])[3] == pytest.approx(fixed + 0.01407 + 0.16)
    rows = predict(FOUND, 8, {2: few, 8: many})
    assert seconds(rows[2])[2] == seconds(rows[2])[3]


def test_a_fixed_time_is_never_negative():
    slow = FOUND._replace(link=Link(1e-3, 1.0))
    four = load([6, 200, 0], [3, 50, 1000], [6, 60, 1500])
    rows = predict(slow, 4, {4: four, 8: 2 * four})
    assert seconds(rows[8]) == pytest.approx([400.012, 200.012, 100.006 + 0.2, 120.012 + 0.3])
    assert seconds(rows[4]) == pytest.approx([1.0, 0.6, 0.5, 0.4]), "as measured"


@pytest.mark.parametrize("density", [0.001, 0.05])
def test_on_many_ranks_the_load_of_owners_hardly_grows_and_that_of_gathering_does(density):
    config = make_config({"sparsity": 1 - density})
    layout = make_layout([Parameter(str(i), (1024, 4096), "float32") for i in range(3)], config)
    training = Training(config, 1, "")
    few, many, two = (traffic_of(layout, training, ranks) for ranks in (16, 256, 2))
    dense, half, gathered, owners = many[:, 1] / few[:, 1]
    assert dense == half == pytest.approx(255 / 256 / (15 / 16), rel=0.01)
    assert owners < 2
    assert owners < gathered
    assert many[3, 1] < many[2, 1] < many[0, 1] * 1.01
    assert many[1, 1] == many[0, 1] / 2
    np.testing.assert_array_equal(many[:, 0] % 255, 0)
    np.testing.assert_array_equal(two[2], two[3])


def test_what_cannot_be_measured_is_one_line(capsys, monkeypatch):
    def gone():
        raise RuntimeError("rank 1 is gone\nmore")

    assert bench.run_bench(arguments(model="no_such_module:make"), lambda: None) == 1
    assert bench.run_bench(arguments(parameters=0), lambda: None) == 1
    assert bench.run_bench(arguments(), lambda: types.SimpleNamespace(size=1, rank=0)) == 1
    assert bench.run_bench(arguments(steps=0), lambda: None) == 1
    assert bench.run_bench(arguments(), gone) == 1
    for name in list(os.environ):
        if name.startswith(("HOROVOD_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    assert main(["bench"]) == 1
    model, parameters, alone, steps, error, unlaunched = capsys.readouterr().err.splitlines()
    assert model.startswith("error: --model no_such_module:make: ModuleNotFoundError: No module named")
    assert model.endswith("give module:function")
    assert parameters == "error: --parameters is 0; allowed: a number of parameters >= 1"
    assert alone.startswith("error: one process exchanges nothing; start one process for each rank: torchrun")
    assert steps.startswith("error: steps is 0; allowed")
    assert error == "error: rank 1 is gone"
    assert unlaunched.startswith("error: no launcher has started this process; start one process for each rank")


@pytest.mark.mpi
@pytest.mark.parametrize("network", [(), ("--bandwidth", "1mbit", "--latency", "1ms")], ids=["none", "described"])
def test_under_torchrun_on_one_host(network):
    pytest.importorskip("torch")
    torchrun = Path(sys.executable).parent / "torchrun"
    command = [torchrun, "--standalone", "--nproc-per-node", "2", "-m", "dgc", "bench", "--parameters", "2000000"]
    done = subprocess.run([*command, *network], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 ranks on one host over torch.distributed" in done.stdout
    assert done.stdout.count(" ms\n") + done.stdout.count(" ms a step") == 4
    assert re.search(r"DGC, 10\.0%.* in 2,000 steps\n.*DGC, 2\.0%.* in 8,000 steps", done.stdout)
    assert "  set: " not in done.stdout
    assert ("  on this host alone: " in done.stdout) == (not network)
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith(("measured", "predicted"))]
    assert ("  no network was seen" in done.stdout) == (not rows) == (not network)
    if network:
        assert "(from a latency of 1000 us and 0.125 MB/s, as you say)" in done.stdout
        assert [int(row[0].replace(",", "")) for row in rows] == [2**i for i in range(1, 11)]
        assert {row[-1] for row in rows} == {"predicted"}
        # Two ranks send 8 MB each: 64 s at 1 Mbit/s, beside which the work that was measured here is small.
        assert 64_000 < float(rows[0][1]) < 90_000
        assert all(float(row[1]) > 1.5 * float(row[2]) > 0 for row in rows)
        assert rows[0][5] == "DGC"
        assert "  on that network, with 2 ranks, set: compression=dgc.Compression.dgc(steps=10000)" in done.stdout
