"""DGCMomentum: on real ranks against Paddle's algorithm, in both Keras, and on one process."""

from pathlib import Path

import pytest

WORKERS = Path(__file__).parent / "workers"


ONE_PROCESS = """
import sys
import warnings

sys.path.insert(0, sys.argv[1])
import momentum_models as mm
from worker_tools import report

import dgc.tensorflow as dgc

own, other = mm.make_variables(), mm.make_variables()
oracle = mm.oracle_of(other, begin=100, nesterov=True, l2=[0.01] * len(other))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optimizer = mm.make(rampup_begin_step=2, use_nesterov=True, regularization=dgc.L2Decay(0.01))
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
