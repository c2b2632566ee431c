"""The mpi transport on 2, 3 and 4 real ranks, and what it says where MPI is missing."""

import subprocess
import sys
from pathlib import Path

import pytest
from launch_tools import case_names
from rank_jobs import each_case

from dgc.errors import TransportError
from dgc.transport.mpi import MPITransport

# A group of some ranks needs three.
KINDS = {f"{n}ranks": {"n": n} for n in (3, 2, 4)}

WORKERS = Path(__file__).parent / "workers"

test_mpi_transport = each_case(WORKERS / "mpi_cases.py", KINDS, more=case_names(WORKERS / "transport_contract.py"))


@pytest.mark.mpi
def test_one_rank(ranks):
    result = ranks.run(
        """
import numpy as np
from dgc.transport.mpi import MPITransport
from worker_tools import report

transport = MPITransport(expect_rank=0, expect_size=1)
array = np.arange(3, dtype=np.float32)
transport.allreduce(array)
out = np.empty((1, 2), np.uint8)
transport.allgather(np.array([1, 2], np.uint8), out)
report([array, out])
""",
        1,
        launcher="single",
    )
    assert result.values == [[[0, 1, 2], [[1, 2]]]]


def test_without_mpi4py_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(TransportError, match=r"pip install mpi4py.*transport=\"horovod\""):
        MPITransport()


def test_importing_the_transports_starts_no_mpi():
    source = """
import subprocess
import sys
import dgc.adapter.agreement, dgc.transport.local, dgc.transport.mpi
print([name for name in ("mpi4py", "horovod", "torch", "tensorflow", "cupy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.strip() == "[]"
