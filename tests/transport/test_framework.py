"""What the transports over the collectives of a framework share; here threads take its place."""

import numpy as np
import pytest

from dgc.errors import TransportError
from dgc.transport import framework
from dgc.transport.framework import FrameworkTransport
from dgc.transport.local import run_ranks

RANKS = 3


class OverThreads(FrameworkTransport):
    name, shut_down = "threads", "the threads are shut down"

    def __init__(self, transport):
        super().__init__(transport.rank, transport.size)
        self.local, self.running, self.gathered, self.sums = transport, True, [], []

    def _gather(self, message):
        out = np.empty((self.size, message.size), np.uint8)
        self.local.allgather(np.ascontiguousarray(message), out)
        self.gathered.append(message.size)
        return out.reshape(-1)

    def _deal(self, message):
        out = np.empty((self.size, message.size // self.size), np.uint8)
        self.local.alltoall(message.reshape(self.size, -1), out)
        return out.reshape(-1)

    def _sum(self, array):
        self.sums.append(array.size)
        self.local.allreduce(array)

    def _is_running(self):
        return self.running


def on_ranks(act, ranks=RANKS):
    return run_ranks(ranks, lambda transport: act(OverThreads(transport)))


def numbers(rank, n, dtype="float32"):
    return np.random.default_rng(rank).standard_normal(n).astype(dtype)


@pytest.mark.parametrize(("beyond", "dtype"), [(0, "float32"), (1, "float32"), (0, "float64"), (1, "float64")])
def test_small_sums_are_folded_in_rank_order_and_larger_ones_by_the_library(beyond, dtype, monkeypatch):
    n = 100 + beyond
    monkeypatch.setattr(framework, "SMALL_BYTES", RANKS * 100 * np.dtype(dtype).itemsize)

    def act(transport):
        array = numbers(transport.rank, n, dtype)
        transport.allreduce(array)
        return array, transport.gathered, transport.sums

    expected = (numbers(0, n, dtype) + numbers(1, n, dtype)) + numbers(2, n, dtype)
    for array, gathered, sums in on_ranks(act):
        np.testing.assert_array_equal(array, expected)
        assert (len(gathered), sums) == ((0, [n]) if beyond else (1, []))


def test_a_large_maximum_is_gathered_in_pieces_and_keeps_a_nan(monkeypatch):
    monkeypatch.setattr(framework, "SMALL_BYTES", 0)
    monkeypatch.setattr(framework, "GATHER_BYTES", 4 * RANKS * 10)

    def act(transport):
        array = numbers(transport.rank, 25)
        array[transport.rank * 11] = np.nan
        transport.allreduce(array, "max")
        return array, transport.gathered, transport.sums

    expected = np.max([numbers(r, 25) for r in range(RANKS)], axis=0)
    expected[[0, 11, 22]] = np.nan
    for array, gathered, sums in on_ranks(act):
        np.testing.assert_array_equal(array, expected)
        assert (gathered, sums) == ([40, 40, 20], [])


def test_empty_arrays_and_single_ranks_need_no_collective():
    def act(transport):
        for n in (0, 5) if transport.size == 1 else (0,):
            array = numbers(0, n)
            transport.allreduce(array)
            np.testing.assert_array_equal(array, numbers(0, n))
        return transport.gathered + transport.sums

    assert on_ranks(act) == [[]] * RANKS
    assert on_ranks(act, 1) == [[]]


def test_messages_of_different_sizes_are_an_error():
    class Cut(OverThreads):
        def _gather(self, message):
            return super()._gather(message)[:-1]

        def _deal(self, message):
            return super()._deal(message)[:-1]

    def act(transport):
        rows = np.zeros((RANKS, 4), np.uint8)
        with pytest.raises(TransportError, match="messages of different sizes: 11 bytes came, expected 12"):
            Cut(transport).alltoall(rows, rows.copy())
        with pytest.raises(TransportError, match="messages of different sizes: 11 bytes in all, expected 12"):
            Cut(transport).allgather(np.zeros(4, np.uint8), np.zeros((RANKS, 4), np.uint8))

    run_ranks(RANKS, act)
