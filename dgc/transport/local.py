"""Ranks as threads of one process: every algorithm is tested on these, no launcher and no network needed.

P = number of ranks, m = message bytes, n = elements.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from dgc.core.transport import Divisible
from dgc.errors import TransportError
from dgc.transport.checks import check_allgather, check_allreduce, reduce_in_rank_order

DEFAULT_TIMEOUT = 300.0
"""Seconds a rank waits for the others before the whole world fails."""


class PeerFailedError(TransportError):
    """This rank was stopped because another rank failed, left or never came."""


class _Round:
    """One collective: what each rank brought so far, and whether it is over."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[str, Any]] = {}
        self.done = False
        self.failure: TransportError | None = None


class _World:
    """The meeting point of P threads.

    The last rank to arrive does the work of the collective for all of them while the others sleep, so no rank can
    change its arrays before everybody has read them, and one round can never be mistaken for the next.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self._changed = threading.Condition()
        self._round = _Round()
        self._left: set[int] = set()
        self._failure: str | None = None
        self._parts: list[_World] = []

    def part(self, size: int) -> _World:
        """The meeting point of some of the threads, which fails with this one."""
        made = _World(size, self.timeout)
        self._parts.append(made)
        return made

    def meet(self, rank: int, signature: str, arrays: object, work: Callable[[list[Any]], None]) -> None:
        """Bring ``arrays`` to the current collective; return when ``work`` has run on all ranks' arrays.

        Args:
            rank: who calls.
            signature: kind, size and dtype of the collective, equal on all ranks or all of them fail.
            arrays: whatever ``work`` needs from this rank.
            work: called once per collective, on one thread, with the arrays of all ranks in rank order.

        Raises:
            TransportError: the signatures differ, or ``work`` failed.
            PeerFailedError: a rank failed, left, or did not come in time.
        """
        with self._changed:
            if self._failure is not None:
                raise PeerFailedError(self._failure)
            if rank in self._left:
                raise TransportError(f"rank {rank}: this transport is closed")
            current = self._round
            if rank in current.calls:
                raise TransportError(f"rank {rank}: two threads called a collective of the same rank at once")
            current.calls[rank] = (signature, arrays)
            if self._left:
                self._fail_locked(f"{_describe_ranks(self._left)} left before {signature} (called on rank {rank})")
            elif len(current.calls) == self.size:
                self._finish_locked(current, work)
            else:
                self._wait_locked(current, rank, signature)
            if current.failure is not None:
                raise current.failure.__class__(str(current.failure))

    def leave(self, rank: int) -> None:
        """Rank ``rank`` makes no further collective; who waits for it fails now instead of waiting on."""
        with self._changed:
            self._left.add(rank)
            if self._round.calls:
                signature = next(iter(self._round.calls.values()))[0]
                waiting = _describe_ranks(self._round.calls)
                self._fail_locked(f"{_describe_ranks(self._left)} left before {signature} (called on {waiting})")

    def fail(self, reason: str) -> None:
        """Stop every rank: those that wait now and those that come later."""
        with self._changed:
            self._fail_locked(reason)
        for part in self._parts:
            part.fail(reason)

    def _fail_locked(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
        self._close_round_locked(self._round, PeerFailedError(self._failure))

    def _close_round_locked(self, current: _Round, failure: TransportError | None) -> None:
        current.failure = failure
        current.done = True
        self._round = _Round()
        self._changed.notify_all()

    def _finish_locked(self, current: _Round, work: Callable[[list[Any]], None]) -> None:
        calls = [current.calls[rank] for rank in range(self.size)]
        failure = None
        if any(signature != calls[0][0] for signature, _ in calls):
            listed = "; ".join(f"rank {rank}: {signature}" for rank, (signature, _) in enumerate(calls))
            failure = TransportError(f"the ranks called different collectives: {listed}")
        else:
            try:
                work([arrays for _, arrays in calls])
            except Exception as error:
                failure = TransportError(f"{calls[0][0]} failed: {type(error).__name__}: {error}")
        if failure is not None:
            # The ranks are out of step from here on, so no later collective can be trusted.
            self._failure = str(failure)
        self._close_round_locked(current, failure)

    def _wait_locked(self, current: _Round, rank: int, signature: str) -> None:
        deadline = time.monotonic() + self.timeout
        while not current.done:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                missing = _describe_ranks(set(range(self.size)) - set(current.calls))
                self._fail_locked(f"rank {rank} waited {self.timeout:g} s in {signature} for {missing}")
                return
            self._changed.wait(remaining)


class LocalTransport(Divisible):
    """One rank of a world of threads. Make them with :func:`local_world` or through :func:`run_ranks`.

    Sums and maxima are folded in rank order, so results are bit-identical on every rank and from run to run.
    """

    name = "local"

    def __init__(self, world: _World, rank: int) -> None:
        """Take place ``rank`` in ``world``."""
        self._world = world
        self.rank = rank
        self.size = world.size

    def allgather(self, message: np.ndarray, out: np.ndarray) -> None:  # noqa: D102
        check_allgather(message, out, self.size)

        def work(calls: list[tuple[np.ndarray, np.ndarray]]) -> None:
            for _, target in calls:
                for row, (source, _) in enumerate(calls):
                    np.copyto(target[row], source)

        self._world.meet(self.rank, f"allgather of {message.size} bytes", (message, out), work)

    def allreduce(self, array: np.ndarray, op: str = "sum") -> None:  # noqa: D102
        check_allreduce(array, op)

        def work(arrays: list[np.ndarray]) -> None:
            result = np.empty_like(arrays[0])
            reduce_in_rank_order(arrays, op, result)
            for target in arrays:
                np.copyto(target, result)

        self._world.meet(self.rank, f"allreduce {op} of {array.size} {array.dtype.name}", array, work)

    def broadcast(self, array: np.ndarray) -> None:  # noqa: D102
        def work(arrays: list[np.ndarray]) -> None:
            for target in arrays[1:]:
                np.copyto(target, arrays[0])

        self._world.meet(self.rank, f"broadcast of {array.size} {array.dtype.name}", array, work)

    def split(self, color: int) -> LocalTransport:  # noqa: D102
        made: list[LocalTransport] = []

        def work(calls: list[tuple[int, list[LocalTransport]]]) -> None:
            colors = [color for color, _ in calls]
            worlds = {color: self._world.part(colors.count(color)) for color in colors}
            for rank, (color, target) in enumerate(calls):
                target.append(LocalTransport(worlds[color], colors[:rank].count(color)))

        self._world.meet(self.rank, "split", (color, made), work)
        return made[0]

    def close(self) -> None:
        """Leave the world. A rank that still waits for this one gets a TransportError."""
        self._world.leave(self.rank)


def local_world(size: int, timeout: float = DEFAULT_TIMEOUT) -> list[LocalTransport]:
    """Make the transports of ``size`` ranks; use each from a thread of its own.

    Args:
        size: number of ranks, at least 1.
        timeout: seconds a rank waits in a collective before all ranks fail.

    Returns:
        The transports in rank order.
    """
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
    """Run ``function(transport, *args)`` once per rank, each in a thread, and wait for all.

    A rank that raises, or returns while others still wait for it, stops the others with a TransportError.

    Args:
        size: number of ranks.
        function: called with this rank's :class:`LocalTransport` and ``args``.
        args: given to every rank, the same objects.
        timeout: seconds for the whole run.
        return_errors: put a rank's exception in its place of the result instead of raising the first.

    Returns:
        What ``function`` returned, in rank order.

    Raises:
        Exception: that of the lowest rank which failed by itself, with a note that names the rank.
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
    for thread in threads:
        thread.start()
    _join(threads, world, timeout)
    if return_errors:
        return [result if error is None else error for result, error in zip(results, errors, strict=True)]
    _raise_first(errors)
    return results


def _join(threads: Sequence[threading.Thread], world: _World, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if not late:
        return
    reason = f"{_describe_ranks(late)} did not finish within {timeout:g} s"
    world.fail(reason)
    # Ranks that wait in a collective end now; one that is stuck in code of its own cannot be stopped.
    for rank in late:
        threads[rank].join(1.0)
    raise TransportError(reason)


def _raise_first(errors: Sequence[BaseException | None]) -> None:
    failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    if not failed:
        return
    rank, error = next((pair for pair in failed if not isinstance(pair[1], PeerFailedError)), failed[0])
    # What add_note does, which Python 3.10 lacks.
    error.__notes__ = [*getattr(error, "__notes__", []), f"raised on rank {rank} of {len(errors)}"]
    raise error


def _describe_ranks(ranks: Iterable[int]) -> str:
    ordered = sorted(ranks)
    return f"rank {ordered[0]}" if len(ordered) == 1 else "ranks " + ", ".join(str(rank) for rank in ordered)
