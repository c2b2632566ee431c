"""Ranks agree on the names of variables that only Keras' counting tells apart."""

import pytest

pytest.importorskip("tensorflow")

from dgc.tensorflow.tensors import common_names
from dgc.transport.local import run_ranks


def names_of(*lists):
    return run_ranks(len(lists), lambda transport: common_names(transport, lists[transport.rank]))


BUILT = ["sequential/dense/kernel", "sequential/dense/bias", "sequential/dense_1/kernel"]


@pytest.mark.parametrize(
    "other",
    [
        BUILT,
        ["dense/kernel", "dense/bias", "dense_1/kernel"],
        ["sequential_7/dense_12/kernel", "sequential_7/dense_12/bias", "sequential_7/dense_13/kernel"],
    ],
    ids=["equal", "loaded", "counted on"],
)
def test_rank_0_names_the_variables(other):
    assert names_of(BUILT, other, BUILT) == [BUILT] * 3
    assert names_of(other, BUILT) == [other] * 2


@pytest.mark.parametrize(
    "other",
    [
        BUILT[:2],
        [BUILT[1], BUILT[0], BUILT[2]],
        ["sequential/conv/kernel", *BUILT[1:]],
        ["kernel", "bias", "kernel"],
    ],
    ids=["fewer", "another order", "another layer", "no layers"],
)
def test_other_names_stay_different(other):
    assert names_of(BUILT, other) == [BUILT, other]


def test_plain_variables_are_told_apart_by_their_order():
    names = ["w", "w#2", "w_1"]
    assert names_of(names, names) == [names] * 2
    assert names_of(["a", "b"], ["b", "a"]) == [["a", "b"], ["b", "a"]]
