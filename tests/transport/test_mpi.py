"""The mpi transport on 2, 3 and 4 real ranks, and what it says where MPI is missing."""

import sys
from pathlib import Path

import pytest
from launch_tools import TESTS, case_names
from rank_jobs import each_case

from dgc.errors import TransportError
from dgc.transport.mpi import MPITransport

# A group of some ranks needs three.
KINDS = {f"{n}ranks": {"n": n} for n in (3, 2, 4)}

WORKERS = Path(__file__).parent / "workers"

test_mpi_transport = each_case(WORKERS / "mpi_cases.py", KINDS, more=case_names(TESTS / "transport_contract.py"))


def test_without_mpi4py_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(TransportError, match=r"pip install mpi4py.*transport=\"horovod\""):
        MPITransport()
