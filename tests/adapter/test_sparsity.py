"""Warnings about a sparsity that seems to be a mistake."""

import warnings

import pytest

from dgc.adapter.checks import warn_of_sparsity, warn_once
from dgc.core.compressors import make_config


def warned(options, algorithm="dgc", *, adaptive=False):
    warn_once.cache_clear()
    config = make_config(options, algorithm=algorithm)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            warn_of_sparsity(config, options, adaptive)
    assert len(caught) <= 1, "once is enough"
    return "".join(str(w.message) for w in caught)


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_share_to_send_in_place_of_the_share_to_hold_back(adaptive):
    text = warned({"sparsity": 0.001}, adaptive=adaptive)
    assert "sends 99.9% of them: to send 0.10%, give sparsity=0.999" in text
    assert "give sparsity=0.99;" in warned({"sparsity": [0.5, 0.01]}, "topk", adaptive=adaptive)


def test_the_default_sparsity_with_sgd():
    text = warned({})
    assert "sends 0.1% of the entries" in text
    assert "dgc(steps=N)" in text
    assert warned({}, adaptive=True) == "", "another warning is about adaptive optimizers"
    assert warned({}, "topk") == ""


@pytest.mark.parametrize(
    "options", [{"steps": 1000}, {"sparsity": 0.999}, {"sparsity": 0.0}, {"sparsity": [0.25, 0.9]}]
)
def test_a_sparsity_that_the_user_has_chosen(options):
    assert warned(options) == ""
