"""The parts of the sharded optimizer that need no ranks: partition, traffic, changes, state dicts."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dgc.errors import WireError  # noqa: E402
from dgc.torch.zero.delta import (  # noqa: E402  # noqa: E402
    UNKNOWN,
    ChangeTracker,
    bits_of,
    choose_travel,
    entries_bytes,
    read_entries,
    write_entries,
)
from dgc.torch.zero.memory import Partition  # noqa: E402
from dgc.torch.zero.state import full_entries, local_dict  # noqa: E402


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


def _cost(counts, numels, itemsize, sparse):
    """Bytes received by all others, counted one owner at a time."""
    sizes = [entries_bytes(n, k, itemsize) if k != UNKNOWN else None for n, k in zip(numels, counts, strict=True)]
    row = max((sizes[r] for r in sparse), default=0)
    return len(counts) * row + sum(n * itemsize for r, n in enumerate(numels) if r not in sparse and sizes[r] != 0)


@pytest.mark.parametrize("seed", range(30))
def test_no_other_split_moves_fewer_bytes(seed):
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 6))
    numels = [int(n) for n in rng.integers(0, 5000, ranks)]
    counts = [UNKNOWN if rng.random() < 0.2 else int(n * min(1.0, 10 ** rng.uniform(-4, 0.2))) for n in numels]
    travel = choose_travel(counts, numels, 4)
    assert not set(travel.sparse) & set(travel.dense)
    for r in range(ranks):
        moved = r in travel.sparse or r in travel.dense
        assert moved == (numels[r] > 0 and counts[r] != 0)
        assert counts[r] != UNKNOWN or r not in travel.sparse
    known = [r for r in range(ranks) if counts[r] > 0]
    others = [[r for r in known if mask >> r & 1] for mask in range(2**ranks)]
    assert _cost(counts, numels, 4, travel.sparse) == min(_cost(counts, numels, 4, s) for s in others)
    assert all(entries_bytes(numels[r], counts[r], 4) <= travel.row_bytes for r in travel.sparse)


@pytest.mark.parametrize("bits", [np.uint8, np.int16, np.int32, np.int64])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (1000, 1), (100_000, 77), (300, 299)])
def test_entries_survive_the_message(bits, n, k):
    rng = np.random.default_rng(n + k)
    positions = np.sort(rng.choice(n, k, replace=False)).astype(np.int64)
    values = rng.integers(0, 2**8, k * np.dtype(bits).itemsize, dtype=np.uint8).view(bits)
    row = np.full(entries_bytes(n, k, np.dtype(bits).itemsize) + 16, 255, np.uint8)
    write_entries(positions, values, n, row)
    found, read = read_entries(row, n, k, np.dtype(bits))
    np.testing.assert_array_equal(found, positions)
    np.testing.assert_array_equal(read, values)
    assert not row[-16:].any()


def test_a_damaged_message_is_an_error():
    positions = np.array([3, 5, 900], np.int64)
    row = np.zeros(entries_bytes(1000, 3, 4), np.uint8)
    write_entries(positions, np.zeros(3, np.int32), 1000, row)
    row[:8] = 255
    with pytest.raises(WireError):
        read_entries(row, 1000, 3, np.dtype(np.int32))


def _parameters(*sizes):
    return [torch.nn.Parameter(torch.zeros(n)) for n in sizes]


def test_changes_are_found_by_bits():
    parameters = _parameters(4, 0, 6, 90)
    tracker = ChangeTracker(parameters)
    tracker.before_update(gradients_known=False)
    with torch.no_grad():
        parameters[0][2] = -0.0
        parameters[2][1] = float("nan")
        parameters[2][3] = 0.0
    changes = tracker.after_update()
    assert changes.positions.tolist() == [2, 5]
    np.testing.assert_array_equal(changes.values, bits_of(torch.tensor([-0.0, float("nan")])).numpy())


def test_the_tracker_pauses_longer_after_each_dense_update_and_keeps_no_copy():
    parameters = _parameters(10)
    tracker = ChangeTracker(parameters)
    looked = []
    for step in range(40):
        tracker.before_update(gradients_known=False)
        if tracker._before:
            looked.append(step)
        with torch.no_grad():
            parameters[0] += 1
        assert tracker.after_update() is None
        assert not tracker._before
    assert looked == [0, 2, 5, 10, 19, 36]


def test_dense_gradients_are_not_even_copied():
    parameters = _parameters(10, 10)
    for p in parameters:
        p.grad = torch.ones(10)
    tracker = ChangeTracker(parameters)
    tracker.before_update(gradients_known=True)
    assert not tracker._before
    parameters[0].grad = None
    parameters[1].grad[5:] = 0
    tracker.before_update(gradients_known=True)
    assert len(tracker._before) == 2


def test_state_is_cut_and_put_together_without_sharing():
    parameters = _parameters(3, 4, 5)
    plain = torch.optim.Adam([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 7.0}], lr=0.1)
    for p in parameters:
        p.grad = torch.ones_like(p)
    plain.step()
    whole = plain.state_dict()
    part = local_dict(whole, [[1], [2]])
    assert [g["params"] for g in part["param_groups"]] == [[0], [1]]
    assert [g["lr"] for g in part["param_groups"]] == [0.1, 7.0]
    assert part["state"][0]["exp_avg"].shape == (4,)
    part["state"][0]["exp_avg"].fill_(9)
    assert not (whole["state"][1]["exp_avg"] == 9).any()
    back = full_entries(part, [[1], [2]])
    assert sorted(back) == [1, 2]
    assert back[1]["exp_avg"].data_ptr() != part["state"][0]["exp_avg"].data_ptr()
