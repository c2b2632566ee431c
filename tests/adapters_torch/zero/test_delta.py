"""Which entries an update changed, and how they routes."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dgc.errors import WireError  # noqa: E402
from dgc.torch.zero.delta import (  # noqa: E402
    UNKNOWN,
    Changes,
    ChangeTracker,
    bits_of,
    choose_routes,
    entries_bytes,
    read_entries,
    values_digest,
    write_entries,
)


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
    routes = choose_routes(counts, numels, 4)
    assert not set(routes.sparse) & set(routes.dense)
    for r in range(ranks):
        moved = r in routes.sparse or r in routes.dense
        assert moved == (numels[r] > 0 and counts[r] != 0)
        assert counts[r] != UNKNOWN or r not in routes.sparse
    known = [r for r in range(ranks) if counts[r] > 0]
    others = [[r for r in known if mask >> r & 1] for mask in range(2**ranks)]
    assert _cost(counts, numels, 4, routes.sparse) == min(_cost(counts, numels, 4, s) for s in others)
    assert all(entries_bytes(numels[r], counts[r], 4) <= routes.row_bytes for r in routes.sparse)


@pytest.mark.parametrize("bits", [np.int8, np.int16, np.int32, np.int64])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (1000, 1), (100_000, 77), (300, 299)])
def test_entries_survive_the_message(bits, n, k):
    rng = np.random.default_rng(n + k)
    positions = np.sort(rng.choice(n, k, replace=False)).astype(np.int64)
    values = rng.integers(0, 2**8, k * np.dtype(bits).itemsize, dtype=np.uint8).view(bits)
    row = np.full(entries_bytes(n, k, np.dtype(bits).itemsize) + 16, 255, np.uint8)
    write_entries(Changes(positions, values), n, row)
    read = read_entries(row, n, k, np.dtype(bits).itemsize)
    np.testing.assert_array_equal(read.positions, positions)
    np.testing.assert_array_equal(read.values, values)
    assert not row[-16:].any()


def test_a_damaged_message_is_an_error():
    positions = np.array([3, 5, 900], np.int64)
    row = np.zeros(entries_bytes(1000, 3, 4), np.uint8)
    write_entries(Changes(positions, np.zeros(3, np.int32)), 1000, row)
    row[:8] = 255
    with pytest.raises(WireError):
        read_entries(row, 1000, 3, 4)


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


def test_a_digest_sees_every_bit_in_any_memory_order():
    t = torch.arange(12.0).view(3, 4)
    same = values_digest([t, torch.tensor(0.5)])
    assert same == values_digest([t.t().contiguous().t(), torch.tensor(0.5)])
    assert same == values_digest([torch.arange(24.0)[::2].div(2).view(3, 4), torch.arange(4.0).div(2)[1::2][0]])
    assert values_digest([torch.tensor([0.0])]) != values_digest([torch.tensor([-0.0])])
    strided = torch.arange(8.0)[::2]
    assert values_digest([strided]) == values_digest([strided.clone()])
    values_digest([torch.zeros(3, dtype=torch.bfloat16), torch.zeros(0)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_digest_sees_changes_in_large_tensors(dtype):
    before = torch.randn(300, 1024, generator=torch.Generator().manual_seed(1)).to(dtype)
    changed = [before.clone() for _ in range(5)]
    changed[0][0, 0] += 1
    changed[1][299, 1023] *= -1
    changed[2][[7, 8]] = before[[8, 7]]  # two rows change places
    changed[3][:] = before.flip(0)
    changed[4].clamp_(-2, 2)
    assert len({values_digest([t]) for t in (before, *changed)}) == 6
    assert values_digest([before]) == values_digest([before.clone()])
