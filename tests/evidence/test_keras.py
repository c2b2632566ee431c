"""Trainings with Keras 3 on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_tools import case_names

from evidence.data.images import prepare_digits

WORKER = Path(__file__).parent / "workers" / "keras_cases.py"


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_keras(ranks, name):
    pytest.importorskip("tensorflow")
    prepare_digits()
    # Additions of several threads come in any order.
    single = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "TF_USE_LEGACY_KERAS": "0"}
    ranks(WORKER, 2, env=single).check(name)
