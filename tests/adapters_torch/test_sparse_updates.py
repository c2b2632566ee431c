"""Parameters updated by received entries alone, on 2 and 4 real ranks."""

from pathlib import Path

from rank_jobs import SIZES, each_case

test_on_real_ranks = each_case(Path(__file__).parent / "workers" / "sparse_updates_cases.py", SIZES)
