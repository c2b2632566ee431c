"""Saved optimizers of one kind of job in another, on 2 real ranks, with either Keras."""

from pathlib import Path

from rank_jobs import KERAS, each_case

test_restored = each_case(Path(__file__).parent / "workers" / "restored_cases.py", KERAS)
