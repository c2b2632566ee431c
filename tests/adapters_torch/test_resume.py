"""Saving and resuming on real ranks."""

from pathlib import Path

from rank_jobs import each_case

test_resume = each_case(Path(__file__).parent / "workers" / "resume_cases.py")
