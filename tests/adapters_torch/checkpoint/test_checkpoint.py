"""Saved and loaded on real ranks: a run goes on as if nothing had happened, or all ranks say why it cannot."""

from pathlib import Path

from rank_jobs import each_case

WORKERS = Path(__file__).parent / "workers"

test_resume = each_case(WORKERS / "resume_cases.py")
test_schedules = each_case(WORKERS / "schedules_cases.py")
test_save = each_case(WORKERS / "save_cases.py")
test_load = each_case(WORKERS / "load_cases.py")
