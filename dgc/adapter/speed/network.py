"""What a collective of this job's transport costs, from a few small ones.

P = number of ranks, m = bytes of a message, n = bytes of a sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dgc.core.transport import Transport

REPETITIONS = 5
"""That are timed, after one that is not; the median of them counts, so that one or two slow ones do not."""

SMALL_BYTES = 256
MIDDLE_BYTES = 16 * 1024
LARGE_BYTES = 8 * 2**20
"""At most: by then nothing lies in the fast caches any more."""

LARGE_SECONDS = 0.02
"""What the largest collective should take, by the rate of the middle one: on slow networks it is a smaller one."""

COLLECTIVES = 3 * (2 * (1 + REPETITIONS) + 1)
"""Of one measurement, those that agree on its results included."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Line:
    """Seconds by bytes: straight between what was measured, and beyond it as between the last two."""

    points: tuple[tuple[int, float], ...]
    """(bytes, seconds), ascending by bytes."""

    def seconds(self, nbytes: int) -> float:
        """What ``nbytes`` cost."""
        sizes, times = zip(*self.points, strict=True)
        if nbytes > sizes[-1] and len(sizes) > 1:
            rate = max(0.0, times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
            return float(times[-1] + rate * (nbytes - sizes[-1]))
        return float(np.interp(nbytes, sizes, times))


@dataclass(frozen=True)
class Network:
    """What an allgather of m bytes from each rank and an allreduce of n bytes cost."""

    gather: Line
    reduce: Line


def measure_network(transport: Transport, clock: Clock = time.perf_counter) -> Network:
    """Measure on all ranks; collective, :data:`COLLECTIVES` in number, and the same result on all ranks.

    Sizes and results are those of the slowest rank, so ranks that measure different things agree.

    Args:
        transport: connects the ranks; nothing else uses it meanwhile.
        clock: seconds, of any origin.

    Raises:
        TransportError: a collective failed.
    """
    middle = max(SMALL_BYTES, MIDDLE_BYTES // transport.size)
    first = _agreed(transport, SMALL_BYTES, SMALL_BYTES, clock)
    second = _agreed(transport, middle, MIDDLE_BYTES, clock)
    large = _larger(middle, second[0], LARGE_BYTES // transport.size), _larger(MIDDLE_BYTES, second[1], LARGE_BYTES)
    third = _agreed(transport, *large, clock)
    return Network(
        _line([(SMALL_BYTES, first[0]), (middle, second[0]), (large[0], third[0])]),
        _line([(SMALL_BYTES, first[1]), (MIDDLE_BYTES, second[1]), (large[1], third[1])]),
    )


def _agreed(transport: Transport, message: int, total: int, clock: Clock) -> tuple[float, float]:
    """Seconds of an allgather and of an allreduce on the slowest rank."""
    gathered, out = np.zeros(message, np.uint8), np.zeros((transport.size, message), np.uint8)
    summed = np.zeros(total // 4, np.float32)
    times = np.array(
        [
            _median(lambda: transport.allgather(gathered, out), clock),
            _median(lambda: transport.allreduce(summed, "sum"), clock),
        ]
    )
    transport.allreduce(times, "max")
    return float(times[0]), float(times[1])


def _larger(nbytes: int, seconds: float, most: int) -> int:
    """A power of two of bytes that take :data:`LARGE_SECONDS` at this rate; at least twice as many."""
    fitting = min(most, nbytes * LARGE_SECONDS / max(seconds, 1e-9))
    return max(2 * nbytes, 1 << max(1, int(fitting)).bit_length() - 1)


def _line(points: list[tuple[int, float]]) -> Line:
    """Equal sizes (on many ranks) count once; no more bytes take less time."""
    line: dict[int, float] = {}
    for nbytes, seconds in points:
        line[nbytes] = max(seconds, *line.values()) if line else seconds
    return Line(tuple(line.items()))


def _median(collective: Callable[[], None], clock: Clock) -> float:
    collective()
    times = []
    for _ in range(REPETITIONS):
        start = clock()
        collective()
        times.append(clock() - start)
    return sorted(times)[REPETITIONS // 2]
