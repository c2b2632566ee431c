"""Variables updated by received entries alone, on 2 real ranks, with Keras 3 and with legacy Keras."""

from pathlib import Path

from rank_jobs import KERAS, each_case

test_on_two_ranks = each_case(Path(__file__).parent / "workers" / "sparse_updates_cases.py", KERAS)
