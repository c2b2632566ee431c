"""Keras' runs that were saved and loaded, with Keras 3 and with legacy Keras: on 2 real ranks, and on other numbers."""

import pytest
from rank_jobs import FLAVOURS, once

STAGE = """
import sys
import warnings
from pathlib import Path

import adapters_tensorflow.workers.models as m
import horovod.tensorflow as hvd
from worker_tools import report

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck

folder, first = Path(sys.argv[1]), int(sys.argv[2])
if first:
    model = m.keras.models.load_model(folder / "model.keras")
    model.compile(optimizer=model.optimizer, loss=m.loss_function, run_eagerly=True)
else:
    model = m.compile_model(dgc.Compression.dgc(**m.SPARSE), learning_rate=0.05, run_eagerly=True)
compression = model.optimizer.compression
seen = {}


class Look(m.keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        seen.update(shown())


def shown():
    # The step, and the first tensor's residual and momentum.
    state = compression.state_dict()
    entry = next(iter(state.get("parameters", {}).values()), {})
    return {"step": state.get("step"), **{key: entry[key].tolist() for key in "uv" if entry}}


keep = dgck.callbacks.CompressionCheckpoint(folder / "dgc-{epoch:02d}")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    m.fit(model, 3, first=first, callbacks=[keep, Look()])
if hvd.rank() == 0:
    model.save(folder / "model.keras")
m.assert_replicas(m.values(model))
report({"before": seen, "after": shown(), "dropped": any("are dropped" in str(w.message) for w in caught)})
"""


@pytest.fixture(params=once(FLAVOURS))
def stage(ranks, request, tmp_path):
    """``stage(n, first)``: three steps more on n ranks; what every rank has seen."""

    def run(n, first=0):
        launcher = "single" if n == 1 else "mpirun"
        values = ranks.run(STAGE, n, tmp_path, first, launcher=launcher, env=FLAVOURS[request.param]).values
        assert len(values) == n
        return values

    return run


@pytest.mark.mpi
@pytest.mark.parametrize(("old", "new"), [(3, 2), pytest.param(2, 4, marks=pytest.mark.matrix)])
def test_another_number_of_ranks_goes_on_with_the_same_state(stage, old, new):
    saved = stage(old)[0]["after"]
    assert saved["step"] == 3
    assert any(saved["u"])
    assert any(saved["v"])
    for value in stage(new, 3):
        assert value["before"] == saved
        assert value["after"]["step"] == 6


@pytest.mark.mpi
def test_to_one_process_and_from_one(stage):
    stage(2)
    (value,) = stage(1, 3)
    assert value["dropped"]
    for value in stage(2, 6):
        assert value["before"]["step"] == 0
        assert value["after"]["step"] == 3
