"""What ``python -m dgc bench`` measures and says, on ranks that are threads and in a real launch."""

import argparse
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from dgc.__main__ import main
from dgc.adapter import bench
from dgc.adapter.bench import Costs, measure, training_of
from dgc.core.compressors import make_config
from dgc.core.config import Schedule
from dgc.errors import ConfigError
from dgc.transport.local import run_ranks


def arguments(**options):
    given = {"parameters": 4_000_000, "model": None, "sparsity": None, "steps": 1000, "optimizer": "sgd"}
    return argparse.Namespace(**{**given, **options})


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
    """It is a fifth of a training with AdamW."""
    training = training_of(arguments(optimizer="adamw"))
    assert Costs(9.0, 5.0, (12.0, 3.0)).advice(training) == "compression=dgc.Compression.dgc(steps=1000)"
    assert Costs(9.0, 5.0, (14.0, 3.0)).advice(training).startswith("compression=dgc.Compression.fp16")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("steps", [1, 60, 5000, 200_000])
def test_it_measures_the_densities_of_the_training(steps, optimizer):
    config = make_config({"steps": steps}).suited(optimizer == "adamw")
    schedule = Schedule(config.sparsity, config.rampup_begin_step, config.rampup_step)
    training = training_of(arguments(steps=steps, optimizer=optimizer))
    expected = [schedule.density(step) for step in range(steps)]
    found = [phase.density for phase in training.phases for _ in range(phase.steps)]
    assert found == pytest.approx(expected)
    assert training.option == f"steps={steps}"


def test_a_sparsity_of_which_the_library_warns_is_refused():
    with pytest.raises(ConfigError, match="too few entries for AdamW"):
        training_of(arguments(sparsity=0.999, optimizer="adamw"))
    assert training_of(arguments(sparsity=0.999)).option == "sparsity=0.999"
    assert training_of(arguments(sparsity=0.95, optimizer="adamw")).option == "sparsity=0.95"


@pytest.mark.parametrize("elements", [1, 100_000])
def test_all_ranks_measure_the_same(elements):
    training = training_of(arguments(optimizer="adamw"))
    one, other = run_ranks(2, lambda transport: measure(transport, elements, training))
    assert one == other
    assert min(one.dense, *one.sparse) > 0
    assert len(one.sparse) == 2
    assert 0 <= one.half <= one.dense


@pytest.mark.parametrize("defers", [False, True])
def test_a_larger_model_costs_as_many_times_more(monkeypatch, defers):
    monkeypatch.setattr(bench, "_ROWS", 16)
    monkeypatch.setattr(bench, "_median", lambda step: step() or 1.0)
    training = training_of(arguments())
    for factor in (1, 1000):
        (found, _) = run_ranks(
            2, lambda transport, n=factor * 16 * 1024: measure(transport, n, training, defers=defers)
        )
        assert found == Costs(factor, factor, (factor,))


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
def test_under_torchrun_on_one_host():
    pytest.importorskip("torch")
    torchrun = Path(sys.executable).parent / "torchrun"
    command = [torchrun, "--standalone", "--nproc-per-node", "2", "-m", "dgc", "bench", "--parameters", "2000000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 ranks on one host over torch.distributed" in done.stdout
    assert done.stdout.count(" ms") == 4
    assert "DGC, 4.7%" in done.stdout
    assert "in 8,000 steps" in done.stdout
    assert "  on this host alone: " in done.stdout
    assert "  no network was seen" in done.stdout
    assert "  set: " not in done.stdout
