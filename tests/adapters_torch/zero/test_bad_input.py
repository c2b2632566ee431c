"""What the sharded optimizer refuses, on 2 and 4 real ranks."""

from pathlib import Path

from rank_jobs import SIZES, each_case

test_bad_input = each_case(Path(__file__).parent / "workers" / "bad_input_cases.py", SIZES)
