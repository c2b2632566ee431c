"""What the adapter takes from Horovod: its collectives as a transport, under every launcher, and errors in time."""

import sys
import types
from pathlib import Path

import pytest
from launch_tools import TESTS, case_names, run_mpi
from rank_jobs import each_case, once

torch = pytest.importorskip("torch")

import dgc.torch as dgc  # noqa: E402
from dgc.torch.horovod import HOROVOD, hold  # noqa: E402

KINDS = {
    "mpirun": {"n": 3},
    "gloo": {"n": 3, "launcher": "gloo"},
    "horovodrun": {"n": 3, "launcher": "horovodrun"},
}

test_transport = each_case(
    Path(__file__).parent / "workers" / "transport_cases.py",
    KINDS,
    more=case_names(TESTS / "transport_contract.py"),
)


@pytest.mark.mpi
def test_one_process(ranks):
    source = """
import horovod.torch as hvd
hvd.init()
import numpy as np
from dgc.torch.horovod import HOROVOD
from worker_tools import report
for choice in ("auto", "horovod"):
    transport = HOROVOD.make_transport(choice)
    array, out = np.ones(3, np.float32), np.empty((1, 2), np.uint8)
    transport.allreduce(array)
    transport.allgather(np.array([1, 2], np.uint8), out)
    report([transport.rank, transport.size, array, out])
"""
    result = ranks.run(source, 1, launcher="single")
    assert result.reports == [[[0, 1, [1, 1, 1], [[1, 2]]]] * 2]


# -- a Horovod that is not ready ---------------------------------------------------------------------------------

FIRST = r"^call torch\.distributed\.init_process_group\(\) .* or hvd\.init\(\) .* first; for Horovod: "
MISSING = "python -m dgc build-horovod --install"
WITHOUT = types.ModuleType("horovod.torch")
WITHOUT.is_initialized = lambda: True
NOT_READY = {
    "missing": (None, f"{FIRST}.*importing horovod.torch failed.*{MISSING}"),
    "without torch": (WITHOUT, f"{FIRST}.*built without PyTorch"),
    "not initialised": (None, r" or hvd\.init\(\) \(Horovod\) first$"),
}


@pytest.mark.parametrize("name", NOT_READY)
def test_horovod_that_is_not_ready_is_a_config_error(name, monkeypatch):
    module, message = NOT_READY[name]
    if name == "not initialised":
        pytest.importorskip("horovod")
    else:
        monkeypatch.setitem(sys.modules, "horovod.torch", module)
        if "horovod" in sys.modules:  # where another test has imported it, its attribute comes first
            monkeypatch.setattr(sys.modules["horovod"], "torch", module, raising=False)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = [
        lambda: HOROVOD.make_transport("auto"),
        lambda: dgc.Compression.dgc(model.named_parameters(), optimizer=optimizer),
        lambda: dgc.DistributedOptimizer(optimizer, model.named_parameters(), compression=dgc.Compression.dgc()),
        lambda: dgc.DistributedOptimizer(optimizer, compression=None),
    ]
    for call in calls:
        with pytest.raises(dgc.ConfigError, match=message) as caught:
            call()
        assert str(caught.value).count("init_process_group") == 1
        assert str(caught.value).count("hvd.init()") == 1


# -- one rank cannot use MPI: all take the same way ----------------------------------------------------------------

FALLBACK = """
import sys, warnings
{before}
import horovod.torch as hvd
hvd.init({init})
from dgc.torch.horovod import HOROVOD
from worker_tools import launch_rank, report

if launch_rank() in {without}:
    kept, sys.modules["mpi4py"] = sys.modules.get("mpi4py"), None

def ask(choice):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcome = type(HOROVOD.make_transport(choice)).__name__
        except Exception as error:
            outcome = f"{{type(error).__name__}}: {{error}}"
    return [outcome, [str(warning.message) for warning in caught]]

report([ask("auto"), ask("auto"), ask("mpi")])
if launch_rank() in {without}:
    sys.modules["mpi4py"] = kept
"""

REVERSED_WORLD = "from mpi4py import MPI\nworld = MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.rank)"

FALLBACKS = {
    "one rank without mpi4py": ("", "", {}, "rank 1: the mpi transport needs mpi4py"),
    "no threads": ("", "", {"HOROVOD_MPI_THREADS_DISABLE": "1"}, "rank 0: Horovod's MPI has no MPI_THREAD_MULTIPLE"),
    "another world": (
        REVERSED_WORLD,
        "comm=world",
        {},
        "rank 0: mpi4py sees rank 1 of 2 where Horovod",
    ),
}


@pytest.mark.mpi
@pytest.mark.parametrize("name", once(FALLBACKS))  # the reasons by themselves: adapter/test_transport_choice.py
def test_all_ranks_fall_back_together_with_one_warning(ranks, name):
    before, init, env, reason = FALLBACKS[name]
    without = [1] if "mpi4py" in name else []
    start = ranks.run if without else lambda script, n, env: run_mpi(n, script, env=env)
    result = start(FALLBACK.format(before=before, init=init, without=without), 2, env=env)
    warned = []
    for (first, first_warnings), (second, second_warnings), (by_name, _) in result.values:
        assert (first, second) == ("HorovodTransport", "HorovodTransport")
        assert by_name.startswith('TransportError: transport="mpi" cannot be used. ' + reason)
        assert second_warnings == []
        warned += first_warnings
    assert len(warned) == 1
    assert warned[0].startswith(f"gradients are sent through Horovod's own collectives instead of mpi4py's: {reason}")


# -- a rank that does not come: the heartbeat ----------------------------------------------------------------------

SAVES_ALONE = """
import horovod.torch as hvd, torch
import dgc.torch as dgc
from worker_tools import report
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
compression = dgc.Compression.dgc(model.named_parameters(), optimizer=optimizer)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
try:
    for step in range(6):
        if step == 4 and hvd.rank() == 1:
            compression.average(optimizer)
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
except Exception as error:
    report(f"{type(error).__name__}: {error}")
    raise
"""


@pytest.mark.mpi
def test_a_rank_that_saves_alone_ends_the_job():
    """One rank is in an allreduce of Horovod's, the other in an allgather: Horovod itself lets both wait for ever."""
    stall = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    result = run_mpi(2, SAVES_ALONE, launcher="gloo", env=stall, check=False)
    assert not result.timed_out, result.explain()
    assert result.returncode != 0
    assert "StallError: rank 0 gives up at the beginning of a step" in str(result.values[0]), result.explain()


# -- tensors that Horovod's thread may let go of -------------------------------------------------------------------

HANDING_OVER = """
import sys, time
import horovod.torch as hvd, torch
hvd.init()
from dgc.torch.horovod import Placeholders
from worker_tools import report

placeholders = Placeholders()
hvd.allreduce(torch.ones(1), name="begin")
if hvd.rank() == 1:
    time.sleep(0.3)
    sys.exit(1)
count = 0
try:
    while True:
        hvd.allreduce_async_(placeholders.take(), name=f"number.{count}")
        count += 1
except hvd.mpi_ops.HorovodInternalError:
    report(count)
"""


@pytest.mark.mpi
def test_a_rank_that_hands_over_tensors_while_another_one_ends_is_told_of_it():
    """With ``torch.ones(1)`` in the place of a placeholder the job hangs nearly always."""
    result = run_mpi(2, HANDING_OVER, check=False)
    assert not result.timed_out, result.explain()
    assert result.values[0] is not None, result.explain()


def test_a_held_tensor_has_one_reference_more():
    tensor = torch.ones(3)
    before = tensor._use_count()
    holder = hold(tensor)
    assert tensor._use_count() == before + 1
    del holder
    assert tensor._use_count() == before
