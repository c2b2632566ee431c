"""Scripts of a single process, and models that go on in one."""

import pytest

ALONE = """
import adapters_tensorflow.workers.models as m
import dgc.tensorflow as dgc

plain = m.make_model()
plain.compile(optimizer=m.keras.optimizers.SGD(0.05, momentum=0.9), loss=m.loss_function)
m.fit(plain, 5)
compression = dgc.Compression.dgc(**m.SPARSE)
model = m.compile_model(compression, learning_rate=0.05)
m.fit(model, 5)
m.assert_equal(m.values(model), m.values(plain))
assert compression.engine is None
assert model.optimizer.inner_optimizer.momentum == 0.9
"""


STOCK = """
import adapters_tensorflow.workers.models as m
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import dgc.tensorflow as dgc

model = m.make_model()
inner = m.keras.optimizers.SGD(0.05, momentum=0.9)
compression = dgc.Compression.dgc(m.raw(model.trainable_variables), optimizer=inner)
distributed = tf.function(lambda: m.tape_step(model, compression, library=hvd, groups=None))
for a, b in zip(distributed(), m.own_gradients(model, *m.batch(0)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
assert inner.momentum == 0.9
assert compression.state_dict()["inactive"]
"""


def test_a_single_process_keeps_its_momentum_and_exchanges_nothing(ranks):
    ranks.run(ALONE, 1, launcher="single")


def test_stock_horovod_traces_a_compressor_in_a_single_process(ranks):
    ranks.run(STOCK, 1, launcher="single")


MOMENTUM = """
import warnings

import adapters_tensorflow.workers.momentum_models as mm
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
def test_dgc_momentum_trains_dense_with_a_warning(ranks):
    warned, step = ranks.run(MOMENTUM, 1, launcher="single").values[0]
    assert warned == ["DGCMomentum with one process compresses nothing"]
    assert step == 6


STAGE = """
import sys

import adapters_tensorflow.workers.models as m
import horovod.tensorflow as hvd
from worker_tools import report

import dgc.tensorflow as dgc

saved, first, steps, target = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if saved == "new":
    model = m.compile_model(dgc.Compression.dgc(**m.SPARSITY_0), learning_rate=0.05, run_eagerly=True)
else:
    model = m.keras.models.load_model(saved)
before = int(model.optimizer.iterations)
if steps:
    m.fit(model, steps, first=first, rank=0)
if hvd.rank() == 0 and target != "nowhere":
    model.save(target)
m.fit(model, 2, first=first + steps, rank=0)
report([before, model.optimizer.momentum, [v.ravel()[:50].tolist() for v in m.values(model)]])
"""


@pytest.mark.mpi
def test_a_saved_model_goes_on_in_one_process_and_on_two_ranks_again(ranks, tmp_path):
    """A single process has momentum's variables in its optimizer, several ranks have not."""

    def stage(n, *arguments):
        return ranks.run(STAGE, n, *arguments, launcher="single" if n == 1 else "mpirun").values[0]

    assert stage(2, "new", 0, 4, tmp_path / "two.keras")[:2] == [0, 0.9]
    before, momentum, alone = stage(1, tmp_path / "two.keras", 4, 4, tmp_path / "one.keras")
    assert (before, momentum) == (4, 0.9)
    before, momentum, together = stage(2, tmp_path / "one.keras", 8, 0, "nowhere")
    assert (before, momentum) == (8, 0.9)
    for a, b in zip(together, alone, strict=True):
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) <= 1e-5 * max(map(abs, b))
