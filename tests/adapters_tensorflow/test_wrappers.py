"""What the wrappers of TensorFlow offer beside the compressor, on 2 real ranks, with either Keras."""

from pathlib import Path

from rank_jobs import KERAS, each_case

test_wrappers = each_case(Path(__file__).parent / "workers" / "wrappers_cases.py", KERAS)
