"""Which trainings there are."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from dgc.core.compressors import make_config
from evidence.application import EvidenceError
from evidence.applications import CLASSES, application_class
from evidence.plan import plan
from evidence.variants import VARIANTS, compressor_options, variant_of


def test_every_run_is_one_of_a_known_variant_and_stands_once():
    runs = plan([0, 1, 2])
    assert len({run.id for run in runs}) == len(runs)
    assert {run.variant for run in runs} == set(VARIANTS)
    assert {run.application for run in runs} == set(CLASSES)


def test_the_first_seed_of_everything_comes_first_and_dense_and_dgc_before_the_rest():
    runs = plan([4, 7])
    assert [run.seed for run in runs] == [4] * (len(runs) // 2) + [7] * (len(runs) // 2)
    assert [run.variant for run in runs[: 2 * len(CLASSES)]] == ["dense", "dgc"] * len(CLASSES)


def test_chosen_applications_alone():
    assert {run.application for run in plan([0], ["speech", "image"])} == {"speech", "image"}


def test_chosen_variants_alone():
    chosen = plan([0, 1], variants=["no-masking", "dense"])
    assert {run.variant for run in chosen} == {"dense", "no-masking"}
    assert chosen == [run for run in plan([0, 1]) if run.variant in ("dense", "no-masking")]


def test_an_application_whose_framework_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "evidence.applications.language", None)
    with pytest.raises(EvidenceError, match=r"'language' needs .*: install it \(make setup"):
        application_class("language")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    sentence = application_class("image_keras").missing()
    assert sentence is not None
    assert sentence.startswith("TensorFlow is missing: install it")


def test_a_name_that_nothing_has_lists_those_there_are():
    with pytest.raises(EvidenceError, match="no application 'chess'; there are image, "):
        application_class("chess")
    with pytest.raises(EvidenceError, match="no variant 'chess'; there are dense, "):
        variant_of("chess")


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.compressor])
def test_the_compressor_of_each_variant_takes_its_options(name):
    class Task:
        epochs, rampup_epochs, clip = 3, 2, 0.5

    variant = variant_of(name)
    options = compressor_options(variant, Task(), 100, None)
    config = make_config(options, algorithm=variant.compressor)
    assert config.algorithm == variant.compressor
    assert (config.local_grad_clip_norm == 0.5) == (variant.clips == "local")
    assert (config.rampup_step == 200) == variant.rampup
