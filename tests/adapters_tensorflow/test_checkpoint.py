"""Keras' runs that were saved and loaded, with Keras 3 and with legacy Keras: on 2 real ranks, and on other numbers."""

import pytest
from rank_jobs import FLAVOURS, once

STAGE = """
import sys
import warnings
from pathlib import Path

import adapters_tensorflow.workers.models as m
import horovod.tensorflow as hvd
import numpy as np
from worker_tools import report

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck

folder, command, first = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if first:
    model = m.keras.models.load_model(folder / "model.keras")
    model.compile(optimizer=model.optimizer, loss=m.loss_function, run_eagerly=True)
else:
    model = m.compile_model(dgc.Compression.dgc(**m.SPARSE), learning_rate=0.05, run_eagerly=True)
compression = model.optimizer.compression
options = {"resize": True} if command == "resize" else {"restore": False} if command == "anew" else {}
seen = {}


class Look(m.keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        seen.update(whole())


def whole():
    # The step, and the mean over the ranks of the first tensor's residual and momentum.
    state = compression.state_dict()
    if not state.get("parameters"):
        return {"step": state.get("step")}
    entry = next(iter(state["parameters"].values()))
    mean = {k: np.asarray(hvd.allreduce(entry[k], op=hvd.Average, name=k)).tolist() for k in "uv"}
    return {"step": state["step"], **mean}


keep = dgck.callbacks.CompressionCheckpoint(folder / "dgc-{epoch:02d}", **options)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        m.fit(model, 3, first=first, callbacks=[keep, Look()])
    except dgc.DGCError as error:
        report({"error": str(error)})
    else:
        if hvd.rank() == 0:
            model.save(folder / "model.keras")
        alike = not m.replicas_differ(m.values(model))
        dropped = any("are dropped" in str(w.message) for w in caught)
        report({"before": seen, "after": whole(), "alike": alike, "dropped": dropped})
"""


@pytest.fixture(params=once(FLAVOURS))
def stage(ranks, request, tmp_path):
    """``stage(n, command, first)``: three steps more on n ranks; what every rank has seen."""

    def run(n, command="go on", first=0):
        launcher = "single" if n == 1 else "mpirun"
        values = ranks.run(STAGE, n, tmp_path, command, first, launcher=launcher, env=FLAVOURS[request.param]).values
        assert len(values) == n
        assert all("error" in v for v in values) or all(v["alike"] for v in values)
        return values

    return run


@pytest.mark.mpi
@pytest.mark.parametrize(("old", "new"), [(3, 2), pytest.param(2, 4, marks=pytest.mark.matrix)])
def test_another_number_of_ranks_is_named_and_can_be_resized_to(stage, old, new):
    saved = stage(old)[0]["after"]
    assert saved["step"] == 3
    for value in stage(new, "go on", 3):
        assert f"was saved by {old} ranks, this job has {new}; pass resize=True" in value["error"]
    for value in stage(new, "resize", 3):
        assert value["before"]["step"] == 3
        for key in "uv":
            expected, found = saved[key], value["before"][key]
            assert any(expected)
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-8)
        assert value["after"]["step"] == 6
    # What was saved by the new number of ranks is theirs.
    assert all(value["before"]["step"] == 6 for value in stage(new, "go on", 6))


@pytest.mark.mpi
def test_to_one_process_and_from_one(stage):
    stage(2)
    (value,) = stage(1, "go on", 3)
    assert "was saved by 2 ranks, this job has 1; pass resize=True" in value["error"]
    (value,) = stage(1, "resize", 3)
    assert value["dropped"]
    for value in stage(2, "go on", 6):
        assert "was saved by 1 rank, this job has 2; pass resize=True" in value["error"]
    for value in stage(2, "resize", 6):
        assert value["before"]["step"] == 0
        assert value["after"]["step"] == 3
