"""The devices of the ranks that send as one: connected by NCCL where all of them can be, after a first sum.

Whatever may fail on one rank is done before the ranks agree; what follows is done by all of them or by none.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from dgc.core.kernels.gpu.memory import GROUP_BYTES, PLACE_BYTES, Joined
from dgc.core.transport import Transport

logger = logging.getLogger("dgc")

_PROBE = 256

_in_use: weakref.WeakSet[Any] = weakref.WeakSet()
"""Runtimes whose stream some exchange adds up on. A second one, with a thread of its own, would enqueue its sums in
another order than on another rank, and both would wait for ever."""
_claiming = threading.Lock()


class DeviceGroup:
    """The devices of a node, connected. To be closed with the exchange."""

    def __init__(self, joined: Joined | None = None, runtime: object = None) -> None:
        """Take what adds up, and the runtime that was claimed for it; nothing for a device that is alone."""
        self._joined = joined
        # A compressor that is dropped without being closed gives the runtime back as well.
        self._release = None if joined is None else weakref.finalize(self, _in_use.discard, runtime)

    def add_up(self, array: object) -> None:
        """Enqueue the sum over the group in the place of each one's array, (n,). Collective."""
        if self._joined is not None:
            self._joined.add_up(array)

    def close(self) -> None:
        """Let go of the others, and of the runtime for another exchange."""
        self._joined = None
        if self._release is not None:
            self._release()


def join_devices(kernels: Any, inside: Transport) -> DeviceGroup | None:
    """Connect the devices of the ranks of ``inside``; None, on all of them, where one cannot and says why. Collective.

    Raises:
        TransportError: a collective of ``inside`` failed.
    """
    if inside.size == 1:
        return DeviceGroup()
    with _claiming:
        mine = kernels.runtime not in _in_use
        _in_use.add(kernels.runtime)
    joined = None
    try:
        joined = _join(kernels, inside, mine)
    finally:
        if mine and joined is None:
            _in_use.discard(kernels.runtime)
    return None if joined is None else DeviceGroup(joined, kernels.runtime)


def _join(kernels: Any, inside: Transport, mine: bool) -> Joined | None:
    runtime = kernels.runtime
    place, group, probe = (np.zeros(n, kind) for n, kind in ((PLACE_BYTES, "u1"), (GROUP_BYTES, "u1"), (_PROBE, "f4")))
    probe[:] = np.arange(_PROBE) * (inside.rank + 1)

    def prepare() -> Any:
        if not mine:
            raise RuntimeError("another compressor of this process does so already")
        place[:] = np.frombuffer(runtime.require_groups(), np.uint8)
        if inside.rank == 0:
            group[:] = np.frombuffer(runtime.new_group(), np.uint8)
        array = kernels.memory.zeros(_PROBE, np.float32)
        kernels.memory.copy_in(array, probe)
        return array

    array = _everywhere(inside, prepare)
    if array is None:
        return None
    places, groups = (np.empty((inside.size, each.size), np.uint8) for each in (place, group))
    inside.allgather(place, places)
    inside.allgather(group, groups)
    if len({row.tobytes() for row in places}) < inside.size:  # NCCL would tell some of them, and the others wait
        if inside.rank == 0:
            _warn("several ranks of the node share a GPU")
        return None
    joined: Joined | None = _everywhere(inside, lambda: runtime.join(groups[0].tobytes(), inside.rank, inside.size))
    if joined is None:
        return None

    def try_out() -> Joined:
        joined.add_up(array)
        wanted = np.arange(_PROBE, dtype=np.float32) * (inside.size * (inside.size + 1) // 2)
        if not np.array_equal(kernels.memory.to_host(array), wanted):
            raise RuntimeError("a first sum came out wrong")
        return joined

    tried: Joined | None = _everywhere(inside, try_out)
    return tried


def _everywhere(inside: Transport, do: Callable[[], Any]) -> Any:
    """What ``do`` returns, once it has succeeded on all ranks; None on all of them where it has not."""
    done, failed = None, np.zeros(1)
    try:
        done = do()
    except Exception as error:  # whatever it is, the others wait to hear of it
        _warn(error)
        failed[:] = 1
    inside.allreduce(failed, "max")
    return None if failed[0] else done


def _warn(why: object) -> None:
    logger.warning("gradients are added up within a node in host memory, not by NCCL: %s", why)
