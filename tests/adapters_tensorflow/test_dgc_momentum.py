"""DGCMomentum: on real ranks against Paddle's algorithm and against PyTorch's, in both Keras, and on one process."""

import os
from pathlib import Path

import pytest
from launch_tools import REPOSITORY, TESTS, case_names, run_cases, run_mpi

HERE = Path(__file__).parent / "workers"
WORKER, ALIKE, MIXED = (HERE / f"{n}_cases.py" for n in ("dgc_momentum", "momentum_alike", "momentum_mixed"))
# Paddle's algorithm in NumPy stands with the tests of PyTorch's optimizer.
PATHS = [REPOSITORY, TESTS, HERE, TESTS / "adapters_torch" / "workers"]
QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": os.pathsep.join(map(str, [*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])),
}
FLAVOURS = {"keras3": {"TF_USE_LEGACY_KERAS": "0"}, "legacy": {"TF_USE_LEGACY_KERAS": "1"}}


@pytest.fixture(scope="module", params=FLAVOURS)
def cases(request):
    return run_cases(2, WORKER, launcher="horovodrun", timeout=400, env={**QUIET, **FLAVOURS[request.param]})


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_on_two_ranks(cases, name):
    cases.check(name)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_pytorch_and_tensorflow_give_the_same_parameters(ranks):
    cases = run_cases(ranks, ALIKE, launcher="horovodrun", timeout=300, env=QUIET)
    for name in case_names(ALIKE):
        cases.check(name)


@pytest.fixture(scope="module", params=FLAVOURS)
def mixed(request):
    return run_cases(2, MIXED, launcher="horovodrun", timeout=200, env={**QUIET, **FLAVOURS[request.param]})


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(MIXED))
def test_mixed_precision_on_two_ranks(mixed, name):
    mixed.check(name)


ONE_PROCESS = """
import warnings

import momentum_models as mm
from worker_tools import report

own, other = mm.make_variables(), mm.make_variables()
oracle = mm.oracle_of(other, begin=100, nesterov=True, l2=[0.01] * len(other))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optimizer = mm.make(rampup_begin_step=2, use_nesterov=True, regularization=mm.dgc.L2Decay(0.01))
    mm.train(optimizer, own, 6)
mm.oracle_train(oracle, other, 6)
mm.assert_close(own, oracle)
report([[str(w.message) for w in caught if w.category is RuntimeWarning], optimizer.state_dict()["step"]])
"""


@pytest.mark.mpi
def test_one_process_trains_dense_with_a_warning():
    warned, step = run_mpi(1, ONE_PROCESS, launcher="single", env=QUIET).values[0]
    assert warned == ["DGCMomentum with one process compresses nothing"]
    assert step == 6
