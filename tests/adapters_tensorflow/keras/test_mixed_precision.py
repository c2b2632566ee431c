"""mixed_float16 on 2 real ranks, with Keras 3 and with legacy Keras."""

from pathlib import Path

from rank_jobs import KERAS, each_case

test_mixed_precision_on_two_ranks = each_case(Path(__file__).parent / "workers" / "mixed_precision_cases.py", KERAS)
