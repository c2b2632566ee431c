"""A step that was synchronized and not applied, on real ranks."""

from pathlib import Path

from rank_jobs import CARRIERS, each_case

test_unapplied_on_real_ranks = each_case(Path(__file__).parent / "workers" / "unapplied_cases.py", CARRIERS)
