"""What every transport promises on real ranks: cases for the worker of each."""

import hashlib
import threading
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pytest
from worker_tools import case as register
from worker_tools import launch_rank, launch_size

from dgc.core.collectives import REDUCTIONS, Transport
from dgc.errors import TransportError

PROMISES: list[Callable[["Carrier"], None]] = []


@dataclass(frozen=True)
class Carrier:
    """A kind of transport, on one of its ranks."""

    make: Callable[[], Transport]
    name: str
    lengths: Collection[int]
    in_rank_order: Collection[int]
    users_sum: Callable[[float], float]
    rank: int = launch_rank()
    size: int = launch_size()

    def keep_promises(self) -> None:
        """Register the cases below for this worker."""
        for promise in PROMISES:

            def of_this_carrier(promise: Callable[["Carrier"], None] = promise) -> None:
                promise(self)

            of_this_carrier.__name__ = promise.__name__
            register(of_this_carrier)


def case(promise):
    """Have ``keep_promises`` register it."""
    PROMISES.append(promise)
    return promise


def ranks_inputs(size, length, dtype):
    """What every rank brings, known to all: widely spread values, so that each order of adding has other bits."""
    draws = [np.random.default_rng((length, rank)) for rank in range(size)]
    return [(draw.standard_normal(length) * 10.0 ** draw.integers(-6, 6, length)).astype(dtype) for draw in draws]


@case
def it_is_a_transport(carrier):
    transport = carrier.make()
    assert isinstance(transport, Transport)
    assert (transport.rank, transport.size, transport.name) == (carrier.rank, carrier.size, carrier.name)
    transport.close()


@case
def allgather_puts_rank_r_in_row_r(carrier):
    transport = carrier.make()
    for length in (0, 1, 100, 3_000_000, *carrier.lengths):
        out = np.zeros((carrier.size, length), np.uint8)
        transport.allgather(np.full(length, carrier.rank + 5, np.uint8), out)
        assert (out == np.arange(5, 5 + carrier.size, dtype=np.uint8)[:, None]).all(), length
    transport.close()


@case
def alltoall_sends_row_r_to_rank_r(carrier):
    transport = carrier.make()
    assert transport.has_alltoall
    for length in (0, 1, 100, 300_000):
        message, out = np.empty((carrier.size, length), np.uint8), np.zeros((carrier.size, length), np.uint8)
        message[...] = np.arange(carrier.size)[:, None] + 10 * carrier.rank
        transport.alltoall(message, out)
        assert (out == 10 * np.arange(carrier.size, dtype=np.uint8)[:, None] + carrier.rank).all(), length
    transport.close()


@case
def allgather_takes_a_read_only_message_without_a_warning(carrier):
    transport = carrier.make()
    out = np.zeros((carrier.size, 8), np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transport.allgather(np.frombuffer(bytes([carrier.rank] * 8), np.uint8), out)
    assert (out == np.arange(carrier.size, dtype=np.uint8)[:, None]).all()
    transport.close()


@case
def allreduce_is_right_and_the_same_on_every_rank(carrier):
    """Every maximum, and sums where the carrier says so, are the fold in the order of the ranks, bit by bit."""
    transport = carrier.make()
    for dtype in (np.float32, np.float64):
        for length in carrier.lengths:
            inputs = ranks_inputs(carrier.size, length, dtype)
            for op in ("sum", "max"):
                array = inputs[carrier.rank].copy()
                transport.allreduce(array, op)
                if op == "max" or length in carrier.in_rank_order:
                    assert array.tobytes() == reduce(REDUCTIONS[op], inputs).tobytes(), (dtype, length, op)
                    continue
                exact = np.array(inputs, np.float64)
                error, magnitude = np.abs(array - exact.sum(axis=0)), np.abs(exact).sum(axis=0)
                assert (error <= magnitude * carrier.size * np.finfo(dtype).eps).all(), (dtype, length)
                digest, digests = hashlib.sha256(array).digest(), np.empty((carrier.size, 32), np.uint8)
                transport.allgather(np.frombuffer(digest, np.uint8), digests)
                assert (digests == digests[0]).all(), (dtype, length)
    transport.close()


@case
def max_keeps_a_nan_and_sums_keep_infinities(carrier):
    transport = carrier.make()
    for length in carrier.lengths:
        array = np.full(length, float(carrier.rank), np.float32)
        if carrier.rank == carrier.size - 1:
            array[0] = np.nan
        transport.allreduce(array, "max")
        assert np.isnan(array[0])
        assert (array[1:] == carrier.size - 1).all()
        array = np.full(length, np.inf if carrier.rank == 0 else 1.0, np.float32)
        transport.allreduce(array, "sum")
        assert np.isposinf(array).all()
    transport.close()


@case
def two_transports_do_not_mix_their_messages_nor_with_the_users(carrier):
    transports, done = [carrier.make(), carrier.make()], []

    def work(transport, value):
        for step in range(40):
            array = np.full(50_000 if step % 2 else 1000, value + carrier.rank, np.float64)
            transport.allreduce(array)
            assert (array == value * carrier.size + carrier.size * (carrier.size - 1) / 2).all()
            out = np.empty((carrier.size, 64), np.uint8)
            transport.allgather(np.full(64, int(value), np.uint8), out)
            assert (out == int(value)).all()
        done.append(value)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(transports, (3.0, 7.0), strict=True)]
    for thread in threads:
        thread.start()
    for step in range(40):
        assert carrier.users_sum(float(step)) == step * carrier.size
    for thread in threads:
        thread.join()
    assert sorted(done) == [3.0, 7.0]
    for transport in transports:
        transport.close()


@case
def wrong_arguments_are_refused(carrier):
    transport = carrier.make()
    floats, bytes_, rows = np.zeros(3, np.float32), np.zeros(3, np.int8), np.zeros((carrier.size, 3), np.uint8)
    for message, function, *arguments in (
        ("float32 or float64", transport.allreduce, np.zeros(3, np.int32)),
        ("op='min'", transport.allreduce, floats, "min"),
        ("uint8", transport.allgather, bytes_, rows),
        ("alltoall", transport.alltoall, rows[0], rows),
    ):
        with pytest.raises(TransportError, match=message):
            function(*arguments)
    transport.close()


@case
def closed_twice_then_used(carrier):
    transport = carrier.make()
    transport.close()
    transport.close()
    with pytest.raises(TransportError, match="closed"):
        transport.allreduce(np.zeros(3, np.float32))
