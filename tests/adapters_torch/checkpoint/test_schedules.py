"""Learning-rate and momentum schedules across a checkpoint, on real ranks."""

from pathlib import Path

from rank_jobs import each_case

test_schedules = each_case(Path(__file__).parent / "workers" / "schedules_cases.py")
