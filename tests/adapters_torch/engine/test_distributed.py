"""dgc's optimizer under torchrun, where neither Horovod nor mpi4py can be imported."""

from pathlib import Path

from rank_jobs import TORCHRUN, each_case

test_under_torchrun = each_case(Path(__file__).parent / "workers" / "distributed_cases.py", TORCHRUN)
