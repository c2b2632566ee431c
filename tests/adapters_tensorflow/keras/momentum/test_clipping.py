"""DGCMomentum, and compressors with a momentum of their own, with optimizers that clip: on 2 ranks, in both Kerases."""

from pathlib import Path

from rank_jobs import KERAS, each_case

test_clipping = each_case(Path(__file__).parent / "workers" / "clipping_cases.py", KERAS)
