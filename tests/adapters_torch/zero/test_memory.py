"""Who owns which parameter."""

import pytest

pytest.importorskip("torch")

from dgc.torch.zero.memory import Partition


def test_partition_is_greedy_and_carries_loads_across_groups():
    partition = Partition(2)
    assert partition.add_group([9, 7, 5, 3, 2]) == [0, 1, 1, 0, 0]
    assert partition.loads == [14, 12]
    assert partition.add_group([1, 4]) == [0, 1]
    assert partition.loads == [15, 16]
    assert partition.indices() == [[[0, 3, 4], [5]], [[1, 2], [6]]]


def test_partition_does_not_depend_on_registration_order_of_sizes():
    loads = []
    for numels in ([1, 1, 1, 1, 4], [4, 1, 1, 1, 1], [1, 1, 4, 1, 1]):
        partition = Partition(2)
        partition.add_group(numels)
        loads.append(sorted(partition.loads))
    assert loads == [[4, 4]] * 3


def test_partition_with_more_ranks_than_parameters():
    partition = Partition(4)
    partition.add_group([5])
    assert partition.indices() == [[[0]], [[]], [[]], [[]]]
