"""Trainings on real ranks, in both frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_tools import case_names

from evidence.applications import application_class
from evidence.data.images import prepare_digits
from evidence.data.text import prepare_words

WORKERS = Path(__file__).parent / "workers"
TORCH, KERAS = WORKERS / "trainings_cases.py", WORKERS / "keras_cases.py"


@pytest.fixture(scope="module", autouse=True)
def _data():
    prepare_digits()
    prepare_words(500)
    application_class("speech").prepare("tiny")


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(TORCH))
def test_trainings(ranks, name):
    ranks(TORCH, 2).check(name)


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(KERAS))
def test_keras(ranks, name):
    pytest.importorskip("tensorflow")
    # Additions of several threads come in any order.
    single = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "TF_USE_LEGACY_KERAS": "0"}
    ranks(KERAS, 2, env=single).check(name)
