"""What a transport costs: the same answer on all ranks, whatever each of them has measured."""

import itertools

import numpy as np
import pytest

from dgc.adapter.speed.network import COLLECTIVES, LARGE_BYTES, REPETITIONS, Line, measure_network
from dgc.adapter.speed.work import Echo
from dgc.transport.local import run_ranks


class Slow(Echo):
    """Echoes, and moves a clock by what each collective costs: a latency, and a time for each byte."""

    def __init__(self, size, latency=1e-4, rate=1e8):
        super().__init__(size)
        self.now, self.latency, self.rate, self.calls = 0.0, latency, rate, []

    def clock(self):
        return self.now

    def allgather(self, message, out):
        self._take("gather", message.nbytes, (self.size - 1) * message.nbytes)
        super().allgather(message, out)

    def allreduce(self, array, op="sum"):
        self._take("reduce", array.nbytes, 2 * (self.size - 1) / self.size * array.nbytes)

    def _take(self, kind, nbytes, travelled):
        self.calls.append((kind, nbytes))
        self.now += self.latency + travelled / self.rate


@pytest.mark.parametrize("size", [2, 4, 64, 300])
@pytest.mark.parametrize("rate", [1e6, 1e8, 1e10])
def test_costs_are_those_of_the_transport(size, rate):
    transport = Slow(size, rate=rate)
    found = measure_network(transport, transport.clock)
    for nbytes in (256, 100_000, 25 * 2**20):
        expected = transport.latency + (size - 1) * nbytes / rate
        assert found.gather.seconds(nbytes) == pytest.approx(expected, rel=0.01)
        expected = transport.latency + 2 * (size - 1) / size * nbytes / rate
        assert found.reduce.seconds(nbytes) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("rate", [1.25e6, 1e8, 1e11])
@pytest.mark.parametrize("size", [2, 16])
def test_it_is_over_soon_after_a_fixed_number_of_collectives(size, rate):
    transport = Slow(size, rate=rate)
    measure_network(transport, transport.clock)
    assert len(transport.calls) == COLLECTIVES
    assert max(nbytes for _, nbytes in transport.calls) <= LARGE_BYTES
    assert transport.now < 1.0


def test_a_slow_sample_does_not_count():
    smooth, rough = Slow(4), Slow(4)
    rough.clock = map(lambda n: rough.now + n // 7, itertools.count()).__next__  # a second more, now and then
    found, expected = (measure_network(each, each.clock) for each in (rough, smooth))
    for ours, theirs in ((found.gather, expected.gather), (found.reduce, expected.reduce)):
        assert np.array(ours.points) == pytest.approx(np.array(theirs.points), rel=1e-6)
    assert REPETITIONS > 2


def test_ranks_with_different_clocks_agree():
    def one_rank(transport):
        ticks = itertools.count()
        factor = 1e-6 * 10 ** (3 * transport.rank)
        return measure_network(transport, lambda: factor * next(ticks) ** 2)

    found = run_ranks(3, one_rank)
    assert found[0] == found[1] == found[2]


def test_between_and_beyond_what_was_measured():
    line = Line(((100, 1.0), (200, 2.0), (400, 6.0)))
    assert [line.seconds(n) for n in (0, 100, 150, 300, 400, 600)] == [1.0, 1.0, 1.5, 4.0, 6.0, 10.0]
    assert Line(((100, 1.0),)).seconds(1000) == 1.0
    assert np.isfinite(Line(((100, 1.0), (200, 1.0))).seconds(10**12))
