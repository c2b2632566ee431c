"""Habits of Horovod scripts, on 2 real ranks: under MPI, and under Gloo, where Horovod carries the bytes."""

from pathlib import Path

from rank_jobs import CARRIERS, each_case

test_habits = each_case(Path(__file__).parent / "workers" / "habits_cases.py", CARRIERS)
