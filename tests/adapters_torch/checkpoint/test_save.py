"""Checkpoints that cannot be written, or share a directory, on real ranks."""

from pathlib import Path

from rank_jobs import each_case

test_save = each_case(Path(__file__).parent / "workers" / "save_cases.py")
