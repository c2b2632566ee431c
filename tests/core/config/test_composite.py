"""Which member of a wrapper a tensor belongs to."""

import pytest

from dgc.core.config import Parts


@pytest.mark.parametrize(
    ("numel", "place"), [(0, 0), (1, 0), (99, 0), (100, 1), (101, 1), (999, 1), (1000, 2), (10**9, 2)]
)
def test_by_size_a_tensor_of_just_the_least_size_belongs_to_the_next_member(numel, place):
    assert Parts((0, 100, 1000), (None, None, None)).place("by_size", "w", numel) == place


def test_by_name_the_first_pattern_that_fits_counts():
    parts = Parts(("*.bias", "fc*", "*"), (None, None, None))
    assert [parts.place("by_name", name, 1) for name in ("fc.bias", "fc.weight", "conv")] == [0, 1, 2]


def test_by_name_capitals_matter_and_no_pattern_may_fit():
    parts = Parts(("Fc*", "conv?"), (None, None))
    assert [parts.place("by_name", name, 1) for name in ("fc", "Fc", "conv", "conv1", "")] == [None, 0, None, 1, None]


@pytest.mark.parametrize("numel", [0, 7, 10**6])
def test_by_step_all_tensors_stand_together(numel):
    assert Parts((0, 500), (None, None)).place("by_step", "w", numel) == 0
