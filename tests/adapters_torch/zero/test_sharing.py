"""Ranks whose parameters differ although no step failed: what the sharded optimizer makes of them."""

from pathlib import Path

from rank_jobs import SIZES, each_case

test_replicas_that_differ = each_case(Path(__file__).parent / "workers" / "sharing_cases.py", SIZES)
