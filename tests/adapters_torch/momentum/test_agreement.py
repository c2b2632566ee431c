"""Ranks that give DGCMomentum different things, on real ranks."""

from pathlib import Path

from rank_jobs import each_case

KINDS = {"2ranks": {}, "3ranks": {"n": 3}, "gloo": {"launcher": "gloo"}}

test_ranks_that_disagree = each_case(Path(__file__).parent / "workers" / "agreement_cases.py", KINDS)
