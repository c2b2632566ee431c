"""What ranks hand in while Horovod's thread idles is answered as ever."""

from pathlib import Path

from rank_jobs import SIZES, each_case

test_idle_collectives = each_case(Path(__file__).parent / "workers" / "idle_collectives_cases.py", SIZES)
