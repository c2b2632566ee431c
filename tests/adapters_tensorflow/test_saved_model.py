"""Optimizers as scripts for plain Keras and dense Horovod use them: equal results on 2 real ranks, in both Kerases."""

from pathlib import Path

import pytest

WORKERS = Path(__file__).parent / "workers"

STAGE = """
import sys

sys.path.insert(0, sys.argv[1])
import horovod.tensorflow as hvd
import models as m
from worker_tools import report

import dgc.tensorflow as dgc

saved, first, steps, target = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
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
        return ranks.run(STAGE, n, WORKERS, *arguments, launcher="single" if n == 1 else "mpirun").values[0]

    assert stage(2, "new", 0, 4, tmp_path / "two.keras")[:2] == [0, 0.9]
    before, momentum, alone = stage(1, tmp_path / "two.keras", 4, 4, tmp_path / "one.keras")
    assert (before, momentum) == (4, 0.9)
    before, momentum, together = stage(2, tmp_path / "one.keras", 8, 0, "nowhere")
    assert (before, momentum) == (8, 0.9)
    for a, b in zip(together, alone, strict=True):
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) <= 1e-5 * max(map(abs, b))
