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
from dgc.adapter.bench import Costs, measure
from dgc.transport.local import run_ranks


@pytest.mark.parametrize(
    ("costs", "advice"),
    [
        (Costs(dense=9.0, half=5.0, sparse=1.0), "compression=dgc.Compression.dgc(sparsity=0.999)"),
        (Costs(dense=9.0, half=5.0, sparse=6.0), "compression=hvd.Compression.fp16"),
        (Costs(dense=1.05, half=1.0, sparse=3.0), "stay dense"),
    ],
    ids=["slow", "medium", "fast"],
)
def test_the_fastest_way_is_advised_and_dense_unless_a_tenth_is_saved(costs, advice):
    assert costs.advice(0.999).startswith(advice)


@pytest.mark.parametrize("elements", [1, 100_000])
def test_all_ranks_measure_the_same(elements):
    one, other = run_ranks(2, lambda transport: measure(transport, elements, 0.99))
    assert one == other
    assert min(one.dense, one.sparse) > 0
    assert 0 <= one.half <= one.dense


def test_a_larger_model_costs_as_many_times_more(monkeypatch):
    monkeypatch.setattr(bench, "_ROWS", 16)
    monkeypatch.setattr(bench, "_median", lambda step: step() or 1.0)
    for factor in (1, 1000):
        (found, _) = run_ranks(2, lambda transport, n=factor * 16 * 1024: measure(transport, n, 0.99))
        assert found == Costs(factor, factor, factor)


def arguments(**options):
    return argparse.Namespace(**{"parameters": 4_000_000, "model": None, "sparsity": 0.999, **options})


def test_what_cannot_be_measured_is_one_line(capsys, monkeypatch):
    def gone():
        raise RuntimeError("rank 1 is gone\nmore")

    assert bench.run(arguments(model="no_such_module:make"), lambda: None) == 1
    assert bench.run(arguments(parameters=0), lambda: None) == 1
    assert bench.run(arguments(), lambda: types.SimpleNamespace(size=1, rank=0)) == 1
    assert bench.run(arguments(), gone) == 1
    for name in list(os.environ):
        if name.startswith(("HOROVOD_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    assert main(["bench"]) == 1
    model, parameters, alone, error, unlaunched = capsys.readouterr().err.splitlines()
    assert model.startswith("error: --model no_such_module:make: ModuleNotFoundError: No module named")
    assert model.endswith("give module:function")
    assert parameters == "error: --parameters is 0; allowed: a number of parameters >= 1"
    assert alone.startswith("error: one process exchanges nothing; start one process for each rank: torchrun")
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
    assert done.stdout.count(" ms") == 3
    assert "  on this host alone: " in done.stdout
    assert "  no network was seen" in done.stdout
    assert "  set: " not in done.stdout
