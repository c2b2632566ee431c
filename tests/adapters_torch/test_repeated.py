"""Gradients that are found again, on real ranks."""

from pathlib import Path

from rank_jobs import each_case

test_repeated = each_case(Path(__file__).parent / "workers" / "repeated_cases.py")
