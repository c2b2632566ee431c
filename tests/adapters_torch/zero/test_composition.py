"""The sharded optimizer inside distributed optimizers, on 2 and 4 real ranks."""

from pathlib import Path

from rank_jobs import SIZES, each_case

test_composition = each_case(Path(__file__).parent / "workers" / "composition_cases.py", SIZES)
