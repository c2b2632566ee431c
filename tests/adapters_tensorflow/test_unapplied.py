"""A step that was exchanged and not applied, on 2 real ranks."""

from pathlib import Path

from rank_jobs import each_case

test_unapplied_on_two_ranks = each_case(Path(__file__).parent / "workers" / "unapplied_cases.py")
