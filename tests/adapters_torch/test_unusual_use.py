"""Unusual use on real ranks."""

from pathlib import Path

from rank_jobs import each_case

test_unusual_use = each_case(Path(__file__).parent / "workers" / "unusual_use_cases.py")
