"""Ranks that send as one, on 4 real ranks of TensorFlow."""

from pathlib import Path

from rank_jobs import each_case

test_nodes = each_case(Path(__file__).parent / "workers" / "hierarchical_cases.py", {"4ranks": {"n": 4}})
