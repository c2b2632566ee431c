"""Seeing inside, on real ranks."""

from pathlib import Path

from rank_jobs import each_case

test_inside = each_case(Path(__file__).parent / "workers" / "inside_cases.py")
