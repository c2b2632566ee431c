"""The cases of workers that need nothing else, on 2 real ranks (and on 4, and by Gloo, where Horovod carries bytes)."""

from pathlib import Path

import pytest
import torch
from documented import own_names
from rank_jobs import CARRIERS, SIZES, each_case

WORKERS = Path(__file__).parent / "workers"
WITH_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")

test_accumulation = each_case(WORKERS / "accumulation_cases.py")
test_broadcast = each_case(WORKERS / "broadcast_cases.py", SIZES)
test_changed_gradients = each_case(WORKERS / "changed_gradients_cases.py")
test_changing_options = each_case(WORKERS / "changing_options_cases.py", CARRIERS)
test_clipping = each_case(WORKERS / "clipping_cases.py", CARRIERS)
test_compiled = each_case(WORKERS / "compiled_cases.py")
test_compressors = each_case(WORKERS / "compressor_cases.py", more=own_names())
test_compressor_state = each_case(WORKERS / "compressor_state_cases.py")
test_dense_equality = each_case(WORKERS / "dense_equality_cases.py", SIZES)
test_device = pytest.mark.gpu(WITH_CUDA(each_case(WORKERS / "device_cases.py")))
test_errors = each_case(WORKERS / "errors_cases.py")
test_first_moment = each_case(WORKERS / "first_moment_cases.py", SIZES)
test_frozen_layers = each_case(WORKERS / "frozen_layers_cases.py", SIZES)
test_gradients = each_case(WORKERS / "gradients_cases.py", SIZES)
test_horovod_closures = each_case(WORKERS / "horovod_closures_cases.py", CARRIERS)
test_momentum = each_case(WORKERS / "momentum_cases.py", SIZES)
test_nodes = each_case(WORKERS / "hierarchical_cases.py", {"4ranks": SIZES["4ranks"]})
test_one_process = each_case(WORKERS / "one_process_cases.py", {"1process": {"n": 1, "launcher": "single"}})
test_optimizer_state = each_case(WORKERS / "optimizer_state_cases.py", CARRIERS)
test_own_steps = each_case(WORKERS / "own_steps_cases.py")
test_process_sets = each_case(WORKERS / "process_sets_cases.py", SIZES)
test_processes = each_case(WORKERS / "processes_cases.py", CARRIERS)
test_rank_differences = each_case(WORKERS / "rank_differences_cases.py", CARRIERS)
test_results_in_grad = each_case(WORKERS / "results_in_grad_cases.py", CARRIERS)
test_scaler = each_case(WORKERS / "scaler_cases.py", SIZES)
test_step_ahead = each_case(WORKERS / "step_ahead_horovod_cases.py", {**CARRIERS, "4ranks": SIZES["4ranks"]})
test_synchronize = each_case(WORKERS / "synchronize_cases.py", CARRIERS)
test_two_optimizers = each_case(WORKERS / "two_optimizers_cases.py")
test_wrong_arguments = each_case(WORKERS / "wrong_arguments_cases.py")
test_zero = each_case(WORKERS / "zero_cases.py", {**SIZES, "gloo": CARRIERS["gloo"]})
test_zero_horovod = each_case(WORKERS / "zero_horovod_cases.py", SIZES)
