"""Large sums by copies on a device, under MPI and Gloo; the device is the processor, NCCL is Horovod's own sum."""

from pathlib import Path

import pytest
from launch_tools import case_names

pytest.importorskip("torch")

WORKER = Path(__file__).parent / "workers" / "device_sums_cases.py"


@pytest.fixture(scope="module", params=[("mpirun", 2), ("gloo", 3)], ids=lambda launch: f"{launch[0]}_{launch[1]}")
def cases(request, ranks):
    launcher, size = request.param
    return ranks(WORKER, size, launcher=launcher)


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_device_sums(cases, name):
    cases.check(name)
