"""What ``python -m dgc bench`` measures and says, on ranks that are threads and in real launches."""

import argparse
import itertools
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from dgc.__main__ import main
from dgc.adapter import bench
from dgc.adapter.bench import Cost, Echo, Line, Network, foresee, measure_network, predict
from dgc.transport.local import run_ranks

SHAPES = [(1024, 1024)] * 8 + [(1024,)] * 4


class Slow(Echo):
    """Echoes, and moves a clock by what each collective costs: a latency, and a time for each byte."""

    def __init__(self, size, latency=1e-4, rate=1e8):
        super().__init__(size)
        self.now, self.latency, self.rate = 0.0, latency, rate

    def allgather(self, message, out):
        self.now += self.latency + (self.size - 1) * message.nbytes / self.rate
        super().allgather(message, out)

    def allreduce(self, array, op="sum"):
        self.now += self.latency + 2 * (self.size - 1) / self.size * array.nbytes / self.rate


@pytest.mark.parametrize("size", [2, 64, 300])
@pytest.mark.parametrize("rate", [1e6, 1e8, 1e10])
def test_costs_are_those_of_the_transport(size, rate):
    transport = Slow(size, rate=rate)
    found = measure_network(transport, lambda: transport.now)
    assert transport.now < 1.0 or size > 64
    for nbytes in (256, 100_000, 25 * 2**20):
        expected = transport.latency + (size - 1) * nbytes / rate
        assert found.gather.seconds(nbytes) == pytest.approx(expected, rel=0.01)
        expected = transport.latency + 2 * (size - 1) / size * nbytes / rate
        assert found.reduce.seconds(nbytes) == pytest.approx(expected, rel=0.01)


def test_ranks_with_different_clocks_agree():
    def one_rank(transport):
        ticks = itertools.count()
        factor = 1e-6 * 10 ** (3 * transport.rank)
        return measure_network(transport, lambda: factor * next(ticks) ** 2)

    found = run_ranks(3, one_rank)
    assert found[0] == found[1] == found[2]


def test_between_and_beyond_what_was_measured():
    line = Line(((100, 1.0), (200, 2.0), (400, 6.0)))
    assert [line.seconds(n) for n in (0, 100, 150, 300, 400, 600)] == [1.0, 1.0, 1.5, 4.0, 6.0, 10.0]


def line(rate):
    """Of a link of ``rate`` bytes a second."""
    return Line(((256, 256 / rate), (1 << 20, (1 << 20) / rate)))


@pytest.mark.parametrize(
    ("rate", "cost", "advice"),
    [
        (1.25e7, Cost(sparse=2e-9, dense=1e-9), "compression=dgc.Compression.dgc(sparsity=0.999)"),
        (1.25e9, Cost(sparse=6e-9, dense=1e-9), "compression=hvd.Compression.fp16"),
        (1e15, Cost(sparse=2e-9, dense=1e-9), "stay dense"),
    ],
    ids=["slow", "medium", "endless"],
)
def test_what_is_advised_follows_from_network_and_work(rate, cost, advice):
    found = foresee(Network(line(rate), line(rate / 2)), cost, 2, SHAPES, 0.999)
    assert found.half <= found.dense
    assert found.advice(0.999).startswith(advice)


def test_all_ranks_predict_the_same(monkeypatch):
    monkeypatch.setattr(bench, "_TRIAL", (64, 64))
    one, other = run_ranks(2, lambda transport: predict(transport, SHAPES, 0.999))
    assert one == other
    assert min(one.dense, one.half, one.sparse) > 0


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
