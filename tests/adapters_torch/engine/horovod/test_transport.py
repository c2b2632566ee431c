"""Which transport a torch job gets, and Horovod's own collectives as one, under every launcher."""

import subprocess
import sys
from pathlib import Path

import pytest
from launch_tools import case_names, run_mpi

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


FALLBACK = """
import warnings
{before}
import horovod.torch as hvd
hvd.init({init})
from dgc.torch.engine.horovod.choice import make_transport
from worker_tools import report

def ask(choice):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcome = type(make_transport(choice)).__name__
        except Exception as error:
            outcome = f"{{type(error).__name__}}: {{error}}"
    return [outcome, [str(warning.message) for warning in caught]]

report([ask("auto"), ask("auto"), ask("mpi")])
"""

NO_MPI4PY_ON_RANK_1 = "import sys, worker_tools\nif worker_tools.launch_rank() == 1: sys.modules['mpi4py'] = None"
REVERSED_WORLD = "from mpi4py import MPI\nworld = MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.rank)"

FALLBACKS = {
    "one rank without mpi4py": (NO_MPI4PY_ON_RANK_1, "", {}, "rank 1: the mpi transport needs mpi4py"),
    "no threads": ("", "", {"HOROVOD_MPI_THREADS_DISABLE": "1"}, "rank 0: Horovod's MPI has no MPI_THREAD_MULTIPLE"),
    "another world": (
        REVERSED_WORLD,
        "comm=world",
        {},
        "rank 0: mpi4py sees rank 1 of 2 where Horovod",
    ),
}


@pytest.mark.mpi
@pytest.mark.parametrize("name", FALLBACKS)
def test_all_ranks_fall_back_together_with_one_warning(name):
    before, init, env, reason = FALLBACKS[name]
    result = run_mpi(2, FALLBACK.format(before=before, init=init), env=env)
    warned = []
    for (first, first_warnings), (second, second_warnings), (by_name, _) in result.values:
        assert (first, second) == ("HorovodTransport", "HorovodTransport")
        assert by_name.startswith('TransportError: transport="mpi" cannot be used. ' + reason)
        assert second_warnings == []
        warned += first_warnings
    assert len(warned) == 1
    assert warned[0].startswith(f"gradients travel through Horovod's own collectives instead of mpi4py's: {reason}")


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


NOT_READY = {
    "missing": ("import sys; sys.modules['horovod'] = None", "importing horovod.torch failed"),
    "without torch": (
        "import sys, types; h = types.ModuleType('horovod'); t = types.ModuleType('horovod.torch'); h.torch = t; "
        "sys.modules.update({'horovod': h, 'horovod.torch': t})",
        "built without PyTorch",
    ),
    "not initialised": ("", "call hvd.init()"),
}


@pytest.mark.parametrize("name", NOT_READY)
def test_horovod_that_is_not_ready_is_a_config_error(name):
    if name == "not initialised":
        pytest.importorskip("horovod")
    before, message = NOT_READY[name]
    source = f"""
{before}
from dgc.errors import ConfigError
from dgc.torch.engine.horovod.choice import make_transport
try:
    make_transport("auto")
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=200, check=True)
    assert message in done.stdout
