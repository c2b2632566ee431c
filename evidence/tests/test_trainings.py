"""Trainings with PyTorch on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_jobs import each_case

from evidence.applications import application_class
from evidence.data.images import prepare_digits
from evidence.data.text import prepare_words


@pytest.fixture(scope="module", autouse=True)
def _data():
    prepare_digits()
    prepare_words(500)
    application_class("speech").prepare("tiny")


test_trainings = each_case(Path(__file__).parent / "workers" / "trainings_cases.py")
