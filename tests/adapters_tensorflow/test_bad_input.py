"""Bad input on 2 real ranks: an error on every rank, never a hang."""

from pathlib import Path

from rank_jobs import KERAS, each_case

test_on_two_ranks = each_case(Path(__file__).parent / "workers" / "bad_input_cases.py", KERAS)
