"""Steps within ``torch.compile``, on real ranks."""

from pathlib import Path

from rank_jobs import each_case

test_compiled = each_case(Path(__file__).parent / "workers" / "compiled_cases.py")
