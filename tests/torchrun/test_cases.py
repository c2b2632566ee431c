"""PyTorch's cases under torchrun, where neither Horovod nor mpi4py can be imported."""

from pathlib import Path

from launch_tools import case_names
from rank_jobs import TORCHRUN, each_case

HERE = Path(__file__).parent
WORKERS = HERE.parent / "adapters_torch" / "workers"

test_transport = each_case(
    HERE / "workers" / "transport_cases.py",
    TORCHRUN,
    more=case_names(HERE.parent / "transport_contract.py"),
)
test_distributed = each_case(WORKERS / "distributed_cases.py", TORCHRUN)
test_ddp = each_case(WORKERS / "ddp_cases.py", TORCHRUN)
test_ddp_join = each_case(WORKERS / "ddp_join_cases.py", TORCHRUN)
test_fsdp = each_case(WORKERS / "fsdp_cases.py", {"torchrun": {"n": 4, "launcher": "torchrun"}})
test_closures = each_case(WORKERS / "closures_cases.py", TORCHRUN)
test_changed_optimizer = each_case(WORKERS / "changed_optimizer_cases.py", TORCHRUN)
test_closing = each_case(WORKERS / "closing_cases.py", TORCHRUN)
test_failed_steps = each_case(WORKERS / "failed_steps_cases.py", TORCHRUN)
test_hidden_options = each_case(WORKERS / "hidden_options_cases.py", TORCHRUN)
test_dense = each_case(WORKERS / "dense_cases.py", TORCHRUN)
test_zero = each_case(WORKERS / "zero_cases.py", TORCHRUN)
test_saved_states = each_case(WORKERS / "saved_states_cases.py", TORCHRUN)
test_step_ahead = each_case(WORKERS / "step_ahead_cases.py", TORCHRUN)
