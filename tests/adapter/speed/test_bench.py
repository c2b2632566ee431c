"""The predictions of ``python -m dgc bench``, on ranks that are threads and in real launches."""

import argparse
import subprocess
import sys
import types
from pathlib import Path

import pytest

from dgc.adapter.speed import bench, choice
from dgc.adapter.speed.network import Line, Network
from dgc.adapter.speed.work import Cost
from dgc.transport.local import run_ranks

SHAPES = [(1024, 1024)] * 8 + [(1024,)] * 4


def line(rate):
    """Of a link of ``rate`` bytes a second."""
    return Line(((256, 256 / rate), (1 << 20, (1 << 20) / rate)))


@pytest.fixture
def measured(monkeypatch):
    def set_to(rate, work):
        network = Network(line(rate), line(rate / 2))
        monkeypatch.setattr(choice, "measure_network", lambda transport: network)
        monkeypatch.setattr(choice, "measure_cost", lambda *_: work)

    return set_to


@pytest.mark.parametrize(
    ("rate", "work", "advice"),
    [
        (1.25e7, Cost(sparse=2e-9, dense=1e-9), "compression=dgc.Compression.dgc(sparsity=0.999)"),
        (1.25e9, Cost(sparse=6e-9, dense=1e-9), "compression=hvd.Compression.fp16"),
        (1e15, Cost(sparse=2e-9, dense=1e-9), "stay dense"),
    ],
    ids=["slow", "medium", "endless"],
)
def test_what_is_advised_follows_from_network_and_work(measured, rate, work, advice):
    measured(rate, work)
    one, other = run_ranks(2, lambda transport: bench.predict(transport, SHAPES, 0.999))
    assert one == other
    assert one.half <= one.dense
    assert one.advice(0.999).startswith(advice)


def arguments(**options):
    return argparse.Namespace(**{"parameters": 4_000_000, "model": None, "sparsity": 0.999, **options})


def test_what_cannot_be_measured_is_one_line(capsys):
    assert bench.run(arguments(model="no_such_module:make"), lambda: None) == 1
    assert bench.run(arguments(), lambda: types.SimpleNamespace(size=1, rank=0)) == 1

    def gone():
        raise RuntimeError("rank 1 is gone\nmore")

    assert bench.run(arguments(), gone) == 1
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("error: --model no_such_module:make: ModuleNotFoundError: No module named")
    assert first.endswith("give module:function")
    assert second.startswith("error: one process exchanges nothing")
    assert third == "error: rank 1 is gone"


@pytest.mark.mpi
def test_under_torchrun():
    pytest.importorskip("torch")
    torchrun = Path(sys.executable).parent / "torchrun"
    command = [torchrun, "--standalone", "--nproc-per-node", "2", "-m", "dgc", "bench", "--parameters", "2000000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 ranks over torch.distributed" in done.stdout
    assert done.stdout.count(" ms") == 3
    assert "  set: " in done.stdout
