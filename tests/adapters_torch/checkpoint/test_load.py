"""Checkpoints that cannot be read, or of other jobs, on real ranks."""

from pathlib import Path

from rank_jobs import each_case

test_load = each_case(Path(__file__).parent / "workers" / "load_cases.py")
