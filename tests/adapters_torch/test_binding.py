"""Before, while and after a compressor is bound, on 2 real ranks."""

from pathlib import Path

from rank_jobs import each_case

test_binding = each_case(Path(__file__).parent / "workers" / "binding_cases.py")
