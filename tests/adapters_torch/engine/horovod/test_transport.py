"""Horovod's own collectives as a transport, and which one is chosen, under every launcher."""

from pathlib import Path

import pytest
from launch_tools import case_names

pytest.importorskip("torch")

WORKER = Path(__file__).parent / "workers" / "transport_cases.py"
LAUNCHES = [("mpirun", 3), ("horovodrun", 2), ("gloo", 3)]


@pytest.fixture(scope="module", params=LAUNCHES, ids=lambda launch: f"{launch[0]}_{launch[1]}")
def cases(request, ranks):
    launcher, size = request.param
    return ranks(WORKER, size, launcher, launcher=launcher)


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_transport(cases, name):
    cases.check(name)


@pytest.mark.mpi
def test_one_process(ranks):
    source = """
import horovod.torch as hvd
hvd.init()
import numpy as np
from dgc.torch.engine.horovod.choice import make_transport
from worker_tools import report
for choice in ("auto", "horovod"):
    transport = make_transport(choice)
    array, out = np.ones(3, np.float32), np.empty((1, 2), np.uint8)
    transport.allreduce(array)
    transport.allgather(np.array([1, 2], np.uint8), out)
    report([transport.rank, transport.size, array, out])
"""
    result = ranks.run(source, 1, launcher="single")
    assert result.reports == [[[0, 1, [1, 1, 1], [[1, 2]]]] * 2]
