"""The edit that lets Horovod's thread idle: it asks less often."""

from pathlib import Path

from rank_jobs import each_case

test_idle_cycles = each_case(Path(__file__).parent / "workers" / "idle_cycles_cases.py")
