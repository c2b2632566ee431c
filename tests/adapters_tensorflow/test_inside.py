"""Seeing inside, on 2 real ranks, with Keras 3 and with legacy Keras."""

from pathlib import Path

from rank_jobs import KERAS, each_case

test_inside = each_case(Path(__file__).parent / "workers" / "inside_cases.py", KERAS)
