"""Large sums by copies on a device, under MPI and Gloo; the device is the processor, NCCL is Horovod's own sum."""

from pathlib import Path

import pytest
from rank_jobs import each_case

pytest.importorskip("torch")

KINDS = {"mpirun": {"n": 2}, "gloo": {"n": 3, "launcher": "gloo"}}

test_device_sums = each_case(Path(__file__).parent / "workers" / "device_sums_cases.py", KINDS)
