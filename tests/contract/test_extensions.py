"""What others may add: a codec, a kernel backend, a transport. Each is written here as its author would write it."""

import threading

import numpy as np
import pytest
from exchange_tools import gradients, make_exchange, on_ranks, run_step, same_results, train

from dgc.core.codecs import padded, register_codec
from dgc.core.collectives import Collectives, Transport, as_transport
from dgc.core.kernels.base import Selection
from dgc.core.kernels.reference import ReferenceKernels
from dgc.errors import TransportError, WireError
from dgc.transport.local import run_ranks

# -- a value codec --------------------------------------------------------------------------------------------------


class PowerValues:
    """A sign and an exponent in one byte: every value becomes the power of two below it."""

    name = "power"
    id = 200

    def max_bytes(self, k, groups):
        return padded(k)

    def encode(self, values, bounds, out):
        if values.dtype != np.float32 or out.size < padded(values.size):
            raise WireError("power: values are not float32, or there is too little room")
        _, exponents = np.frexp(values)
        codes = np.clip(exponents + 63, 1, 127).astype(np.uint8) * np.isfinite(values) * (values != 0)
        out[: values.size] = codes | ((values < 0).astype(np.uint8) << 7)
        out[: values.size][~np.isfinite(values)] = 0x80
        out[values.size : padded(values.size)] = 0
        return padded(values.size)

    def decode(self, data, count, bounds):
        if data.size < padded(count):
            raise WireError("power: the block is too short")
        codes = data[:count].astype(np.int32)
        values = np.ldexp(np.float32(0.5), (codes & 127) - 63) * ((codes & 127) > 0)
        values = np.where(codes & 0x80, -values, values).astype(np.float32)
        values[codes == 0x80] = np.nan
        return values, padded(count)


POWER = PowerValues()
register_codec("values", POWER)


def test_a_codec_keeps_what_the_protocol_promises():
    values, bounds = np.array([0, 1, -1, 0.3, -1e-5, 1000, np.inf, np.nan], np.float32), np.array([0, 8])
    block = np.empty(POWER.max_bytes(8, 1), np.uint8)
    POWER.encode(values, bounds, block)
    read, _ = POWER.decode(block, 8, bounds)
    np.testing.assert_array_equal(read, np.float32([0, 1, -1, 0.25, -(2.0**-17), 512, np.nan, np.nan]))


def test_a_codec_travels_in_messages_and_its_error_stays_in_the_residual():
    def steps(exchange, rank):
        results = [run_step(exchange, gradients(step, rank))[1] for step in range(6)]
        return results, [exchange.state.residual(i) for i in (0, 2)]

    (results, left), (others, left_there) = on_ranks(2, steps, sparsity=0.9, momentum=0.0, values="power")
    magnitudes = np.abs(results[0][0]) * 2  # the mean of two ranks: one power of two, or the sum of two
    alone = np.log2(magnitudes[magnitudes > 0])
    assert (alone == np.round(alone)).mean() > 0.5
    for mine, theirs in zip(results, others, strict=True):
        same_results([mine], [theirs])
    # sent + residual == gradients, whatever the codec makes of a value
    for i, v, w in zip((0, 2), left, left_there, strict=True):
        came = sum(gradients(step, rank)[i] for step in range(6) for rank in range(2)) / 2
        np.testing.assert_allclose(sum(step[i] for step in results) + (v + w) / 2, came, atol=2e-5)


# -- a kernel backend -----------------------------------------------------------------------------------------------


class SortingKernels(ReferenceKernels):
    """Selects by a stable sort instead of a partition."""

    name = "sorting"

    def __init__(self):
        self.calls = 0

    def accumulate_and_select(self, work, u, v, thresholds):
        self.calls += 1
        nonfinite = self.accumulate(work, u, v)
        chosen = []
        for w in work:
            values = v[w.offset : w.offset + w.length]
            order = np.argsort(-np.abs(values), kind="stable")[: w.k]
            chosen.append(w.offset + np.sort(order[values[order] != 0]))
        positions = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
        return Selection(positions, nonfinite, v[positions])

    def begin_selection(self, work, u, v, thresholds):
        return lambda: self.accumulate_and_select(work, u, v, thresholds)


def test_a_backend_trains_as_the_reference_does():
    options = dict(sparsity=0.9, momentum=0.9, nesterov=True, weight_decay=0.01, bucket_bytes=2048)
    own = SortingKernels()
    got, wanted = (train(2, 8, kernels=kernels, **options) for kernels in (own, ReferenceKernels()))
    assert got[0][1].kernels.name == "sorting"
    same_results([params for params, _ in wanted], [params for params, _ in got])
    assert own.calls > 0


# -- a transport ----------------------------------------------------------------------------------------------------


class BoardTransport:
    """Two ranks that write on a common board and meet at barriers."""

    name = "board"

    def __init__(self, rank, board, barrier):
        self.rank, self.size = rank, 2
        self._board, self._barrier = board, barrier

    def _show(self, array):
        """Every rank's array."""
        try:
            self._board[self.rank] = array.copy()
            self._barrier.wait(300)
            arrays = list(self._board)
            self._barrier.wait(300)
        except threading.BrokenBarrierError as error:
            raise TransportError("the other rank did not come") from error
        return arrays

    def allgather(self, message, out):
        out[...] = self._show(message)

    def allreduce(self, array, op="sum"):
        arrays = self._show(array)
        np.add(*arrays, out=array) if op == "sum" else np.maximum(*arrays, out=array)

    def close(self):
        self._barrier.abort()


def on_two_ranks(function):
    board, barrier = [None, None], threading.Barrier(2)
    # as_transport is what transport= does
    return run_ranks(2, lambda transport: function(as_transport(BoardTransport(transport.rank, board, barrier))))


@pytest.mark.parametrize("begin", [0, 3])
def test_a_transport_carries_two_ranks(begin):
    options = dict(sparsity=0.9, momentum=0.9, rampup_begin_step=begin, bucket_bytes=2048)

    def five_steps(transport):
        exchange = make_exchange(transport, **options)
        results = [run_step(exchange, gradients(0, transport.rank))[1] for _ in range(5)]
        exchange.close()
        return exchange.transport.name, results

    assert isinstance(BoardTransport(0, [], None), Collectives)
    assert not isinstance(BoardTransport(0, [], None), Transport)
    for mine, wanted in zip(on_two_ranks(five_steps), run_ranks(2, five_steps), strict=True):
        assert mine[0] == "board"
        same_results(wanted[1], mine[1])


def test_a_transport_that_fails_is_an_error_of_the_step():
    def rank(transport):
        exchange = make_exchange(transport, sparsity=0.9)
        if transport.rank == 1:
            transport.close()
            return
        with pytest.raises(TransportError, match="did not come"):
            run_step(exchange, gradients(0, 0))
        exchange.close()

    on_two_ranks(rank)
