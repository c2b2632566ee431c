"""Gradients that stay on their rank, on 2 real ranks, with either Keras."""

from pathlib import Path

from rank_jobs import KERAS, each_case

test_step = each_case(Path(__file__).parent / "workers" / "step_cases.py", KERAS)
