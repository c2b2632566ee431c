"""Trainings with Keras 3 on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_jobs import each_case

from evidence.data.images import prepare_digits


@pytest.fixture(scope="module", autouse=True)
def _data():
    pytest.importorskip("tensorflow")
    prepare_digits()


# Additions of several threads come in any order.
SINGLE = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "TF_USE_LEGACY_KERAS": "0"}

test_keras = each_case(Path(__file__).parent / "workers" / "keras_cases.py", {"keras3": {"env": SINGLE}})
