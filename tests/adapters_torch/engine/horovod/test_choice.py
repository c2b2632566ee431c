"""Which transport a torch job gets where one rank cannot use MPI: all the same."""

import pytest
from launch_tools import run_mpi
from rank_jobs import once

pytest.importorskip("torch")

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
@pytest.mark.parametrize("name", once(FALLBACKS))  # the reasons by themselves: transport/test_choice.py
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
    assert warned[0].startswith(f"gradients are sent through Horovod's own collectives instead of mpi4py's: {reason}")
