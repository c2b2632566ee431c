"""The cases of all workers, on 2 real ranks (and on 4, and by Gloo), in Keras 3 and in legacy Keras."""

from pathlib import Path

from documented import own_names
from rank_jobs import CARRIERS, KERAS, SIZES, each_case

WORKERS = Path(__file__).parent / "workers"

test_dense_equality = each_case(
    WORKERS / "dense_equality_cases.py",
    {**KERAS, "4ranks": SIZES["4ranks"], "gloo": CARRIERS["gloo"]},
    beyond=["nodes_that_send_as_one_equal_dense_and_stay_alike"],
)
test_tape = each_case(WORKERS / "tape_cases.py")
test_first_moment = each_case(WORKERS / "first_moment_cases.py")
test_fit = each_case(WORKERS / "fit_cases.py", KERAS)
test_own_updates = each_case(WORKERS / "own_updates_cases.py", KERAS)
test_changing_options = each_case(WORKERS / "changing_options_cases.py", KERAS)
test_accumulation = each_case(WORKERS / "accumulation_cases.py", KERAS)
test_two_exchanges = each_case(WORKERS / "two_exchanges_cases.py", KERAS)
test_broadcast = each_case(WORKERS / "broadcast_cases.py", KERAS)
test_rank_differences = each_case(WORKERS / "rank_differences_cases.py", KERAS)
test_frozen = each_case(WORKERS / "frozen_cases.py", KERAS)
test_renamed = each_case(WORKERS / "renamed_cases.py", KERAS, beyond=["every_compressor_in_fit_resumes_bit_for_bit"])
test_checkpoint = each_case(
    WORKERS / "checkpoint_cases.py", KERAS, beyond=["every_schedule_of_keras_goes_on_from_a_checkpoint"]
)
test_restored = each_case(WORKERS / "restored_cases.py", KERAS)
test_binding = each_case(WORKERS / "binding_cases.py", KERAS)
test_wrong_arguments = each_case(WORKERS / "wrong_arguments_cases.py", KERAS)
test_wrappers = each_case(WORKERS / "wrappers_cases.py", KERAS)
test_sparse_gradients = each_case(WORKERS / "sparse_gradients_cases.py", KERAS)
test_mixed_precision = each_case(WORKERS / "mixed_precision_cases.py", KERAS)
test_momentum = each_case(WORKERS / "momentum_cases.py", KERAS)
test_clipping = each_case(WORKERS / "clipping_cases.py", KERAS)
test_compressors = each_case(WORKERS / "compressor_cases.py", more=own_names())
test_process_sets = each_case(WORKERS / "process_sets_cases.py", {"3ranks": {"n": 3}})
test_step_ahead = each_case(WORKERS / "step_ahead_cases.py")
test_join = each_case(WORKERS / "join_cases.py", {**SIZES, "legacy": KERAS["legacy"], "gloo": CARRIERS["gloo"]})
