"""The mpi transport on 2, 3 and 4 real ranks, and what it says where MPI is missing."""

import subprocess
import sys
from pathlib import Path

import pytest
from launch_tools import case_names, run_mpi

from dgc.errors import ConfigError, TransportError
from dgc.transport.mpi import MPITransport
from dgc.transport.mpi_stall import seconds_of

WORKER = Path(__file__).parent / "workers" / "mpi_cases.py"


@pytest.fixture(scope="module", params=[2, 3, 4], ids="{}_ranks".format)
def cases(request, ranks):
    return ranks(WORKER, request.param)


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_mpi_transport(cases, name):
    cases.check(name)


@pytest.mark.mpi
def test_one_rank():
    result = run_mpi(
        1,
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
import dgc.transport.agreement, dgc.transport.local, dgc.transport.mpi
print([name for name in ("mpi4py", "horovod", "torch", "tensorflow", "cupy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.strip() == "[]"


LATE = """
import sys, time
import horovod.torch as hvd
hvd.init()
import numpy as np
import dgc.transport.mpi as mpi
from worker_tools import report

transport = mpi.MPITransport()
if hvd.rank() == 0:
    test = mpi.is_done
    def late(*arguments):
        time.sleep(0.5)
        return test(*arguments)
    mpi.is_done = late
out = np.empty((2, 4), np.uint8)
transport.allgather(np.full(4, hvd.rank(), np.uint8), out)
report(out)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("closing", ["", "transport.close()"], ids=["left open", "closed"])
def test_a_rank_that_ends_first_does_not_take_mpi_from_one_that_still_receives(closing):
    """Horovod's exit handler ends Horovod on all ranks, and with it MPI."""
    assert run_mpi(2, LATE + closing).values == [[[0] * 4, [1] * 4]] * 2


FINALIZED = """
import pathlib, sys, time
import horovod.torch as hvd
hvd.init()
import numpy as np
import dgc.transport.mpi as mpi
import dgc.transport.mpi_exit as mpi_exit
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
            if mpi_exit._leaving.is_set():
                last = min(last, time.monotonic() + 0.2)
            time.sleep(0.01)
        return False

transport = mpi.MPITransport()
if hvd.rank() == 1:
    mpi_exit.waiting().__enter__()  # failed, so it bids nobody farewell
    while not inside.exists():
        time.sleep(0.01)
    sys.exit()
call = mpi.{call}
mpi.{call} = lambda _, argument: call(Late(), argument)
try:
    transport.allgather(np.zeros(4, np.uint8), np.empty((2, 4), np.uint8))
except TransportError as error:
    report(str(error))
"""


@pytest.mark.mpi
@pytest.mark.parametrize("call", ["start", "is_done"])
def test_mpi_is_not_called_once_another_thread_finalizes_it(call, tmp_path):
    """Horovod's thread does, when another rank ends; here always between the look at MPI's state and the call."""
    values = run_mpi(2, FINALIZED.format(call=call, inside=str(tmp_path / "inside"))).values
    assert values[0].startswith("MPI was shut down while a collective waited"), values


LEAVE = """
import sys
import dgc.transport.mpi_exit as mpi_exit
from worker_tools import report

met = []
mpi_exit.say_farewell = lambda mpi: met.append(True)
{before}
mpi_exit.leave()
report(len(met))
"""


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("before", "meetings"),
    [
        ("", 1),
        ("sys.last_value = ValueError('uncaught')", 0),
        ("mpi_exit.waiting().__enter__()", 0),
        ("with mpi_exit.waiting(): pass", 1),
    ],
)
def test_a_rank_that_failed_does_not_wait_for_others(before, meetings):
    assert run_mpi(1, LEAVE.format(before=before)).values == [meetings]


CHILD = """
import faulthandler, os, sys, time
import horovod.torch as hvd
hvd.init()
import numpy as np
from dgc.core.exchange.status import StepStatus
from dgc.errors import TransportError
from dgc.torch.engine.horovod.horovod import HOROVOD
from dgc.transport.mpi import MPITransport
from worker_tools import report

HOROVOD.require_ready()
transport, status = MPITransport(), StepStatus()
out = np.empty((2, 4), np.uint8)
faulthandler.cancel_dump_traceback_later()  # a child would wait for its thread
child = os.fork()
if child == 0:
    for refused in (lambda: transport.allgather(np.zeros(4, np.uint8), out), status.require_usable):
        try:
            refused()
        except TransportError as error:
            assert "forked" in str(error)
        else:
            os._exit(3)
    transport.close()
    sys.exit(7)  # which runs exit handlers, unlike the end of a worker of multiprocessing
deadline = time.monotonic() + 30
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


STOPPED = """
import os, signal, time, warnings
import horovod.torch as hvd
hvd.init()
import numpy as np
from dgc.errors import StallError
from dgc.transport.mpi import MPITransport
from dgc.transport.mpi_stall import StallWatch
from mpi4py import MPI
from worker_tools import report

transport = MPITransport()
out = np.empty((3, 4), np.uint8)
transport.allgather(np.zeros(4, np.uint8), out)
os.environ.update(HOROVOD_STALL_CHECK_TIME_SECONDS="1", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="3")
transport._stall = StallWatch(MPI, transport._comm)
if hvd.rank() == 2:
    time.sleep(0.7)  # late, but in time
transport.allgather(np.zeros(4, np.uint8), out)
if hvd.rank() == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        transport.allgather(np.zeros(4, np.uint8), out)
    except StallError as error:
        report([[str(w.message) for w in caught], str(error)])
        raise
"""


@pytest.mark.mpi
def test_a_rank_that_is_stopped_is_named_and_given_up_and_the_job_ends():
    result = run_mpi(3, STOPPED, check=False, timeout=100)
    assert not result.timed_out, result.explain()
    assert result.returncode != 0
    told = [values for values in result.values if values]
    assert told, result.explain()  # the first one that ends, ends the others
    for (warning,), error in told:
        assert "still waits in an exchange of gradients: it has waited 1 s for rank 2: stopped" in warning
        assert "gives up in an exchange of gradients: it has waited 3 s for rank 2: stopped" in error
        assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" in error


STOPPED_IN_TRAINING = """
import os, signal
import horovod.torch as hvd, torch
hvd.init()
import dgc.core.exchange.pipeline as pipeline, dgc.torch as dgc
from dgc.transport.mpi_stall import StallWatch
from mpi4py import MPI

pipeline._STALL_PATIENCE = 1.0
torch.manual_seed(0)
model = torch.nn.Linear(50, 50)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
names = list(model.named_parameters())
compression = dgc.Compression.dgc(names, optimizer=optimizer)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=names, compression=compression)
for step in range(5):
    if step == 3:
        os.environ.update(HOROVOD_STALL_CHECK_TIME_SECONDS="1", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="3")
        transport = compression.engine.transport
        transport._stall = StallWatch(MPI, transport._comm)
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
    optimizer.zero_grad()
    model(torch.ones(2, 50)).sum().backward()
    optimizer.step()
"""


@pytest.mark.mpi
def test_a_caller_that_waits_in_horovod_for_a_rank_that_is_stopped_is_ended():
    result = run_mpi(2, STOPPED_IN_TRAINING, check=False, timeout=100)
    assert not result.timed_out, result.explain()
    assert result.returncode != 0
    assert "rank 0 gives up" in result.stderr, result.explain()


@pytest.mark.parametrize(("text", "seconds"), [("", 7.0), (" 3.5 ", 3.5), ("0", 0.0)])
def test_seconds_come_from_the_environment(monkeypatch, text, seconds):
    monkeypatch.setenv("SOME_SECONDS", text)
    assert seconds_of("SOME_SECONDS", 7.0) == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_other_times_are_refused(monkeypatch, text):
    monkeypatch.setenv("SOME_SECONDS", text)
    with pytest.raises(ConfigError, match=r"SOME_SECONDS is .* a number of seconds"):
        seconds_of("SOME_SECONDS", 7.0)
