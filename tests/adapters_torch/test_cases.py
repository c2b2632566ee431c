"""The cases of workers that need nothing else, on 2 real ranks (and on 4, and by Gloo, where Horovod carries bytes)."""

from pathlib import Path

from documented import own_names
from rank_jobs import CARRIERS, SIZES, each_case

WORKERS = Path(__file__).parent / "workers"

test_equality = each_case(WORKERS / "equality_cases.py", SIZES)
test_sparse_updates = each_case(WORKERS / "sparse_updates_cases.py", SIZES)
test_compressors = each_case(WORKERS / "compressor_cases.py", more=own_names())
test_nodes = each_case(WORKERS / "hierarchical_cases.py", {"4ranks": SIZES["4ranks"]})
test_binding = each_case(WORKERS / "binding_cases.py")
test_habits = each_case(WORKERS / "habits_cases.py", CARRIERS)
test_unapplied = each_case(WORKERS / "unapplied_cases.py", CARRIERS)
test_repeated = each_case(WORKERS / "repeated_cases.py")
test_unusual_use = each_case(WORKERS / "unusual_use_cases.py")
test_mixed_use = each_case(WORKERS / "mixed_use_cases.py")
test_compiled = each_case(WORKERS / "compiled_cases.py")
test_broadcast = each_case(WORKERS / "broadcast_cases.py")
test_horovod_closures = each_case(WORKERS / "horovod_closures_cases.py")
