"""PyTorch and TensorFlow give the same results for the same gradients, on 2 real ranks."""

from pathlib import Path

from rank_jobs import each_case

test_both_adapters_select_the_same_entries = each_case(Path(__file__).parent / "workers" / "same_core_cases.py")
