"""Ranks as threads: what every transport promises, and an error instead of a hang when ranks fall out of step."""

import threading

import numpy as np
import pytest
from transport_contract import PROMISES, Carrier

from dgc.errors import ConfigError, TransportError
from dgc.transport.local import local_world, run_ranks

LENGTHS = (1, 2, 1001)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_local(promise, size):
    worlds = [local_world(size) for _ in range(2)]

    def rank(users):
        def users_sum(number):
            array = np.array([number])
            users.allreduce(array)
            return array[0]

        transports = iter(world[users.rank] for world in worlds)
        promise(Carrier(lambda: next(transports), "local", LENGTHS, LENGTHS, users_sum, users.rank, size))

    run_ranks(size, rank)


def _gather(transport, message):
    out = np.empty((transport.size, message.size), np.uint8)
    transport.allgather(message, out)
    return out


def test_a_failing_rank_is_raised_and_stops_the_others():
    stopped = []

    def rank(transport):
        if transport.rank == 1:
            raise ConfigError("no such option")
        try:
            transport.allreduce(np.ones(3, np.float32))
        except TransportError as error:
            stopped.append(str(error))
            raise

    with pytest.raises(ConfigError, match="no such option") as caught:
        run_ranks(3, rank)
    assert caught.value.__notes__ == ["raised on rank 1 of 3"]
    assert stopped == ["rank 1 raised ConfigError: no such option"] * 2


def test_a_rank_that_leaves_early_stops_the_others():
    def rank(transport):
        if transport.rank != 2:
            transport.allreduce(np.ones(3, np.float32))

    results = run_ranks(3, rank, return_errors=True)
    assert results[2] is None
    for result in results[:2]:
        assert isinstance(result, TransportError)
        assert "rank 2 left before allreduce sum of 3 float32" in str(result)


MISMATCHES = {
    "kind": lambda transport: (
        _gather(transport, np.zeros(4, np.uint8)) if transport.rank else transport.allreduce(np.zeros(4, np.float32))
    ),
    "message size": lambda transport: _gather(transport, np.zeros(4 + transport.rank, np.uint8)),
    "array size": lambda transport: transport.allreduce(np.zeros(4 + transport.rank, np.float32)),
    "dtype": lambda transport: transport.allreduce(np.zeros(4, (np.float32, np.float64)[transport.rank])),
    "op": lambda transport: transport.allreduce(np.zeros(4, np.float32), ("sum", "max")[transport.rank]),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_is_an_error_on_every_rank(name):
    results = run_ranks(2, MISMATCHES[name], return_errors=True)
    messages = [str(result) for result in results]
    assert all(isinstance(result, TransportError) for result in results)
    assert messages[0] == messages[1]
    assert "different collectives" in messages[0]
    assert "rank 0:" in messages[0]
    assert "rank 1:" in messages[0]


def test_after_a_mismatch_nothing_works_any_more():
    def rank(transport):
        with pytest.raises(TransportError):
            transport.allreduce(np.zeros(1 + transport.rank, np.float32))
        with pytest.raises(TransportError, match="different collectives"):
            transport.allreduce(np.zeros(1, np.float32))

    run_ranks(2, rank)


def test_a_rank_that_never_comes_is_named():
    transports = local_world(2, timeout=0.05)
    with pytest.raises(TransportError, match=r"rank 0 waited 0\.05 s in allreduce .* for rank 1"):
        transports[0].allreduce(np.ones(1, np.float32))
    with pytest.raises(TransportError, match="rank 0 waited"):
        transports[1].allreduce(np.ones(1, np.float32))


def test_a_rank_stuck_in_its_own_code_is_named():
    release = threading.Event()

    def rank(transport):
        if transport.rank == 1:
            release.wait(600)

    try:
        with pytest.raises(TransportError, match=r"rank 1 did not finish within 0.5 s"):
            run_ranks(2, rank, timeout=0.5)
    finally:
        release.set()
