"""Steps that fail and are survived, on 2 and 4 real ranks."""

from pathlib import Path

from rank_jobs import SIZES, each_case

test_after_failed_steps = each_case(Path(__file__).parent / "workers" / "recovery_cases.py", SIZES)
