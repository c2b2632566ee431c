"""DGCMomentum: on real ranks against Paddle's algorithm and against PyTorch's, in both Keras, and on one process."""

from pathlib import Path

import pytest
from launch_tools import case_names
from rank_jobs import FLAVOURS

WORKERS = Path(__file__).parent / "workers"
WORKER, ALIKE, MIXED = (WORKERS / f"{n}_cases.py" for n in ("optimizer", "alike", "mixed_precision"))


@pytest.fixture(scope="module", params=FLAVOURS)
def cases(request, ranks):
    return ranks(WORKER, 2, env=FLAVOURS[request.param])


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_on_two_ranks(cases, name):
    cases.check(name)


@pytest.mark.mpi
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", case_names(ALIKE))
def test_pytorch_and_tensorflow_give_the_same_parameters(ranks, size, name):
    ranks(ALIKE, size).check(name)


@pytest.fixture(scope="module", params=FLAVOURS)
def mixed(request, ranks):
    return ranks(MIXED, 2, env=FLAVOURS[request.param])


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(MIXED))
def test_mixed_precision_on_two_ranks(mixed, name):
    mixed.check(name)


ONE_PROCESS = """
import sys
import warnings

sys.path.insert(0, sys.argv[1])
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
def test_one_process_trains_dense_with_a_warning(ranks):
    warned, step = ranks.run(ONE_PROCESS, 1, WORKERS, launcher="single").values[0]
    assert warned == ["DGCMomentum with one process compresses nothing"]
    assert step == 6
