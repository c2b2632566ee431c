"""The examples with an embedding train without a warning under the lines that README shows."""

import re

import pytest
from launch_tools import REPOSITORY, run_mpi
from rank_jobs import once

pytestmark = [pytest.mark.mpi]

GUESS = 5.55  # nats of a byte that may be any
LAUNCHERS = {"torchrun_text": "torchrun", "keras_text": "mpirun"}


@pytest.mark.parametrize("name", once(LAUNCHERS))
def test_learns_to_read(name):
    pytest.importorskip("tensorflow" if name == "keras_text" else "torch")
    result = run_mpi(2, REPOSITORY / "examples" / f"{name}.py", 60, launcher=LAUNCHERS[name])
    loss, ratio = map(float, re.findall(r"([\d.]+), (\d+) times", result.stdout)[-1])
    assert loss < 0.8 * GUESS
    assert ratio > 10
    assert "sparse gradients" not in result.stderr, result.explain()
