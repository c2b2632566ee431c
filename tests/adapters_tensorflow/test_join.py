"""``dgc.tensorflow.join``: ranks with different numbers of batches."""

from pathlib import Path

from rank_jobs import CARRIERS, KERAS, SIZES, each_case

test_join = each_case(
    Path(__file__).parent / "workers" / "join_cases.py", {**SIZES, "legacy": KERAS["legacy"], "gloo": CARRIERS["gloo"]}
)
