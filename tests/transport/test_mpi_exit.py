"""How a process leaves an MPI job: not before the others, not for ever after them, and with no call of MPI too late."""

import pytest
from launch_tools import run_mpi
from rank_jobs import once

LATE = """
import sys, time
import horovod.torch as hvd
hvd.init()
import numpy as np
import dgc.transport.mpi as mpi
from worker_tools import report

transport = mpi.MPITransport()
if hvd.rank() == 0:
    call = mpi.call
    def late(module, function):
        if getattr(function, "__name__", None) == "Test":
            time.sleep(0.5)
        return call(module, function)
    mpi.call = late
out = np.empty((2, 4), np.uint8)
transport.allgather(np.full(4, hvd.rank(), np.uint8), out)
report(out)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("closing", once(["", "transport.close()"]), ids=["left open", "closed"])
def test_a_rank_that_ends_first_does_not_take_mpi_from_one_that_still_receives(closing):
    """Horovod's exit handler ends Horovod on all ranks, and with it MPI."""
    assert run_mpi(2, LATE + closing).values == [[[0] * 4, [1] * 4]] * 2


FINALIZED = """
import pathlib, sys, time
import horovod.torch as hvd
hvd.init()
import numpy as np
import dgc.transport.mpi as mpi
from dgc.errors import TransportError
from mpi4py import MPI
from worker_tools import report

inside = pathlib.Path({inside!r})

class Late:
    def Is_finalized(self):
        if MPI.Is_finalized():
            return True
        inside.touch()
        last = time.monotonic() + 100
        while time.monotonic() < last:
            if MPI.Is_finalized():
                report("MPI was finalized before it was called")
                sys.exit()
            if mpi._leaving.is_set():
                last = min(last, time.monotonic() + 0.2)
            time.sleep(0.01)
        return False

transport = mpi.MPITransport()
if hvd.rank() == 1:
    mpi.waiting().__enter__()  # failed, so it bids nobody farewell
    while not inside.exists():
        time.sleep(0.01)
    sys.exit()
call = mpi.call
def late(module, function):
    tests = getattr(function, "__name__", None) == "Test"
    return call(Late() if tests is {tests} else module, function)
mpi.call = late
try:
    transport.allgather(np.zeros(4, np.uint8), np.empty((2, 4), np.uint8))
except TransportError as error:
    report(str(error))
"""


@pytest.mark.mpi
@pytest.mark.parametrize("tests", once([True, False]), ids=["test", "start"])
def test_mpi_is_not_called_once_another_thread_finalizes_it(tests, tmp_path):
    """Horovod's thread does, when another rank ends; here always between the look at MPI's state and the call."""
    values = run_mpi(2, FINALIZED.format(tests=tests, inside=str(tmp_path / "inside"))).values
    assert values[0].startswith("MPI was shut down while a collective waited"), values


FAILED = """
import time
import horovod.torch as hvd
hvd.init()
from dgc.transport.mpi import MPITransport

transport = MPITransport()
if hvd.rank() == 1:
    raise ValueError("uncaught")
time.sleep(300)
"""


@pytest.mark.mpi
def test_a_rank_that_failed_does_not_wait_for_others():
    result = run_mpi(2, FAILED, check=False)
    assert result.returncode != 0
    assert result.seconds < 200, result.explain()


CHILD = """
import faulthandler, os, sys, time
import horovod.torch as hvd
hvd.init()
import numpy as np
from dgc.core.exchange.stages import LatestStep
from dgc.errors import TransportError
from dgc.torch.horovod import HOROVOD
from dgc.transport.mpi import MPITransport
from worker_tools import report

HOROVOD.require_ready()
transport = MPITransport()
step = LatestStep()
out = np.empty((2, 4), np.uint8)
faulthandler.cancel_dump_traceback_later()  # a child would wait for its thread
child = os.fork()
if child == 0:
    for refused in (lambda: transport.allgather(np.zeros(4, np.uint8), out), step.require_usable):
        try:
            refused()
        except TransportError as error:
            assert "forked" in str(error)
        else:
            os._exit(3)
    transport.close()
    sys.exit(7)  # which runs exit handlers, unlike the end of a worker of multiprocessing
deadline = time.monotonic() + 200
ended = (0, 0)
while not ended[0] and time.monotonic() < deadline:
    ended = os.waitpid(child, os.WNOHANG)
    time.sleep(0.01)
if not ended[0]:
    os.kill(child, 9)
report(os.waitstatus_to_exitcode(ended[1]) if ended[0] else "the child hangs")
for _ in range(3):
    transport.allgather(np.full(4, hvd.rank(), np.uint8), out)
report(out)
"""


@pytest.mark.mpi
def test_a_forked_child_ends_by_itself_and_leaves_the_job_alone():
    result = run_mpi(2, CHILD)
    assert result.reports == [[7, [[0] * 4, [1] * 4]]] * 2
