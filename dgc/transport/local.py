"""The transport between threads of one process. Tests of algorithms use it; it needs no launcher and no network.

P = number of ranks, m = message bytes, n = elements.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from typing_extensions import override

from dgc.core.collectives import Divisible, check_allgather, check_allreduce, check_alltoall, reduce_in_rank_order
from dgc.errors import TransportError

DEFAULT_TIMEOUT = 300.0  # seconds that a rank waits for the others before all ranks fail


class PeerFailedError(TransportError):
    """This rank was stopped because another rank failed, left or did not arrive."""


class _World:
    """The meeting point of P threads.

    The last rank to arrive runs the collective for all ranks while the others sleep. So no rank can change its arrays
    before all ranks have read them.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self._timeout = timeout
        self._changed = threading.Condition()
        self._calls: dict[int, tuple[str, Any]] = {}
        self._done = 0  # the number of collectives that are over
        self._left: set[int] = set()
        self._error: TransportError | None = None
        self._parts: list[_World] = []

    def part(self, size: int) -> _World:
        """Return a meeting point for some of the threads. It fails when this one fails."""
        made = _World(size, self._timeout)
        self._parts.append(made)
        return made

    def meet(self, rank: int, signature: str, arrays: object, work: Callable[[list[Any]], None]) -> None:
        """Bring ``arrays`` to the current collective; return when ``work`` has run on all ranks' arrays.

        ``signature`` (kind, size and dtype) must be equal on all ranks, or all of them fail. ``work`` is called once,
        on one thread, with the arrays of all ranks in rank order.
        """
        with self._changed:
            if self._error is not None:
                raise PeerFailedError(str(self._error))
            if rank in self._left:
                raise TransportError(f"rank {rank}: this transport is closed")
            if rank in self._calls:
                raise TransportError(f"rank {rank}: two threads called a collective of the same rank at once")
            self._calls[rank] = (signature, arrays)
            number = self._done
            if self._left:
                self._fail(f"{_describe_ranks(self._left)} left before {signature} (called on rank {rank})")
            elif len(self._calls) == self.size:
                self._finish(work)
            elif not self._changed.wait_for(lambda: self._done > number or self._error, self._timeout):
                missing = _describe_ranks(set(range(self.size)) - set(self._calls))
                self._fail(f"rank {rank} waited {self._timeout:g} s in {signature} for {missing}")
            if self._error is not None and self._done == number:
                raise type(self._error)(str(self._error))

    def leave(self, rank: int) -> None:
        """Remove a rank. Ranks that wait for it fail immediately."""
        with self._changed:
            self._left.add(rank)
            if self._calls:
                signature, _ = next(iter(self._calls.values()))
                waiting = _describe_ranks(self._calls)
                self._fail(f"{_describe_ranks(self._left)} left before {signature} (called on {waiting})")

    def fail(self, reason: str) -> None:
        """Stop all ranks, including those that arrive later."""
        with self._changed:
            self._fail(reason)
        for part in self._parts:
            part.fail(reason)

    def _fail(self, reason: str, error: type[TransportError] = PeerFailedError) -> None:
        if self._error is None:
            self._error = error(reason)
        self._changed.notify_all()

    def _finish(self, work: Callable[[list[Any]], None]) -> None:
        """Do the work. If it fails, all later collectives fail, too."""
        calls = [self._calls[rank] for rank in range(self.size)]
        if any(signature != calls[0][0] for signature, _ in calls):
            listed = "; ".join(f"rank {rank}: {signature}" for rank, (signature, _) in enumerate(calls))
            return self._fail(f"the ranks called different collectives: {listed}", TransportError)
        try:
            work([arrays for _, arrays in calls])
        except Exception as error:
            return self._fail(f"{calls[0][0]} failed: {type(error).__name__}: {error}", TransportError)
        self._calls, self._done = {}, self._done + 1
        self._changed.notify_all()


class LocalTransport(Divisible):
    """One rank of a world of threads, made by :func:`local_world` or :func:`run_ranks`.

    Sums and maxima are computed in rank order, so results are bit-identical on every rank and in every run.
    """

    name = "local"

    def __init__(self, world: _World, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size

    @override
    def allgather(self, message: np.ndarray, out: np.ndarray) -> None:
        check_allgather(message, out, self.size)

        def work(calls: list[tuple[np.ndarray, np.ndarray]]) -> None:
            for _, target in calls:
                for row, (source, _) in enumerate(calls):
                    np.copyto(target[row], source)

        self._world.meet(self.rank, f"allgather of {message.size} bytes", (message, out), work)

    @override
    def allreduce(self, array: np.ndarray, op: str = "sum") -> None:
        check_allreduce(array, op)

        def work(arrays: list[np.ndarray]) -> None:
            result = np.empty_like(arrays[0])
            reduce_in_rank_order(arrays, op, result)
            for target in arrays:
                np.copyto(target, result)

        self._world.meet(self.rank, f"allreduce {op} of {array.size} {array.dtype.name}", array, work)

    @override
    def alltoall(self, message: np.ndarray, out: np.ndarray) -> None:
        check_alltoall(message, out, self.size)

        def work(calls: list[tuple[np.ndarray, np.ndarray]]) -> None:
            for receiver, (_, target) in enumerate(calls):
                for sender, (source, _) in enumerate(calls):
                    np.copyto(target[sender], source[receiver])

        self._world.meet(self.rank, f"alltoall of {message.nbytes} bytes", (message, out), work)

    @override
    def broadcast(self, array: np.ndarray) -> None:
        def work(arrays: list[np.ndarray]) -> None:
            for target in arrays[1:]:
                np.copyto(target, arrays[0])

        self._world.meet(self.rank, f"broadcast of {array.size} {array.dtype.name}", array, work)

    @override
    def split(self, color: int) -> LocalTransport:
        made: list[LocalTransport] = []

        def work(calls: list[tuple[int, list[LocalTransport]]]) -> None:
            colors = [color for color, _ in calls]
            worlds = {color: self._world.part(colors.count(color)) for color in colors}
            for rank, (color, target) in enumerate(calls):
                target.append(LocalTransport(worlds[color], colors[:rank].count(color)))

        self._world.meet(self.rank, "split", (color, made), work)
        return made[0]

    @override
    def close(self) -> None:
        """Leave the world. A rank that still waits for this one gets a TransportError."""
        self._world.leave(self.rank)


def local_world(size: int, timeout: float = DEFAULT_TIMEOUT) -> list[LocalTransport]:
    """Return the transports of ``size`` ranks, one per thread. If a rank waits ``timeout`` seconds, all fail."""
    if size < 1:
        raise TransportError(f"a world needs at least 1 rank, got size={size}")
    world = _World(size, timeout)
    return [LocalTransport(world, rank) for rank in range(size)]


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: object,
    timeout: float = DEFAULT_TIMEOUT,
    return_errors: bool = False,
) -> list[Any]:
    """Run ``function(transport, *args)`` for each rank in a separate thread, and wait for all of them.

    A rank that raises, or that returns while others wait for it, stops the others with a TransportError.

    Args:
        size: number of ranks.
        function: called with this rank's :class:`LocalTransport` and ``args``.
        args: the same objects for every rank.
        timeout: seconds until all ranks must have returned.
        return_errors: do not raise the first exception; instead, return each rank's exception in place of its result.

    Returns:
        The results of ``function``, in rank order.

    Raises:
        Exception: the error of the lowest rank that failed on its own, with a note that names the rank.
        TransportError: a rank did not finish in time.
    """
    transports = local_world(size, timeout)
    world = transports[0]._world
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = function(transports[rank], *args)
        except BaseException as error:
            errors[rank] = error
            world.fail(f"rank {rank} raised {type(error).__name__}: {error}")
        finally:
            transports[rank].close()

    threads = [threading.Thread(target=run, args=(rank,), name=f"dgc-rank-{rank}", daemon=True) for rank in range(size)]
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if late := [rank for rank, thread in enumerate(threads) if thread.is_alive()]:
        reason = f"{_describe_ranks(late)} did not finish within {timeout:g} s"
        world.fail(reason)
        # Ranks that wait in a collective end now. A rank that hangs in its own code cannot be stopped.
        for rank in late:
            threads[rank].join(1.0)
        raise TransportError(reason)
    if return_errors:
        return [result if error is None else error for result, error in zip(results, errors, strict=True)]
    failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    if failed:
        rank, own = next((pair for pair in failed if not isinstance(pair[1], PeerFailedError)), failed[0])
        # This does what add_note() does, which Python 3.10 lacks.
        own.__notes__ = [*getattr(own, "__notes__", []), f"raised on rank {rank} of {size}"]
        raise own
    return results


def _describe_ranks(ranks: Iterable[int]) -> str:
    ordered = sorted(ranks)
    return f"rank {ordered[0]}" if len(ordered) == 1 else "ranks " + ", ".join(str(rank) for rank in ordered)
