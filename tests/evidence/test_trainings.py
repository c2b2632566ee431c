"""Trainings with PyTorch on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_tools import case_names

from evidence.applications import application_class
from evidence.data.images import prepare_digits
from evidence.data.text import prepare_words

WORKER = Path(__file__).parent / "workers" / "trainings_cases.py"


@pytest.fixture(scope="module", autouse=True)
def _data():
    prepare_digits()
    prepare_words(500)
    application_class("speech").prepare("tiny")


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_trainings(ranks, name):
    ranks(WORKER, 2).check(name)
