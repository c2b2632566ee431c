"""What else runs in a training script beside the exchange, on real ranks."""

from pathlib import Path

from rank_jobs import each_case

test_mixed_use = each_case(Path(__file__).parent / "workers" / "mixed_use_cases.py")
