"""Horovod's own collectives as a transport, and which one is chosen, under every launcher."""

from pathlib import Path

import pytest
from launch_tools import TESTS, case_names
from rank_jobs import each_case

pytest.importorskip("torch")

KINDS = {
    "mpirun": {"n": 3},
    "gloo": {"n": 3, "launcher": "gloo"},
    "horovodrun": {"n": 3, "launcher": "horovodrun"},
}

test_transport = each_case(
    Path(__file__).parent / "workers" / "transport_cases.py",
    KINDS,
    more=case_names(TESTS / "transport" / "workers" / "transport_contract.py"),
)


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
