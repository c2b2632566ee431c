"""The devices of the ranks that send as one: connected by NCCL where all of them can be, after a first sum."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from dgc.core.kernels.gpu.memory import GROUP_BYTES, Joined
from dgc.core.transport import Transport

logger = logging.getLogger("dgc")

_PROBE = 256


class Alone:
    """A device that has nobody to add up with; see :class:`dgc.core.kernels.gpu.memory.Joined`."""

    def add_up(self, array: Any) -> None:
        """The sum is what is there."""


def join_devices(kernels: Any, inside: Transport) -> Joined | None:
    """Connect the devices of a group of ranks. Collective, blocking.

    Args:
        kernels: of this rank, on a device.
        inside: connects the ranks of the group.

    Returns:
        What adds up on their devices; None, on all of them, where one cannot. That rank says why.

    Raises:
        TransportError: a collective of ``inside`` failed.
    """
    if inside.size == 1:
        return Alone()
    group = np.zeros(GROUP_BYTES, np.uint8)
    failure: Exception | None = None
    try:
        kernels.runtime.require_groups()
        if inside.rank == 0:
            group[:] = np.frombuffer(kernels.runtime.new_group(), np.uint8)
    except Exception as error:  # whatever it is, the others wait to hear of it
        failure = error
    if _somewhere(inside, failure):
        return None
    groups = np.empty((inside.size, GROUP_BYTES), np.uint8)
    inside.allgather(group, groups)
    joined: Joined | None = None
    try:
        joined = kernels.runtime.join(groups[0].tobytes(), inside.rank, inside.size)
    except Exception as error:  # whatever it is, the others wait to hear of it
        failure = error
    if _somewhere(inside, failure):
        return None
    assert joined is not None, "no rank failed"
    try:
        _try_out(kernels, joined, inside)
    except Exception as error:  # whatever it is, the others wait to hear of it
        failure = error
    return None if _somewhere(inside, failure) else joined


def _try_out(kernels: Any, joined: Joined, inside: Transport) -> None:
    """A sum whose outcome is known.

    Raises:
        RuntimeError: it failed or came out wrong.
    """
    values = np.arange(_PROBE, dtype=np.float32)
    array = kernels.memory.zeros(_PROBE, np.float32)
    kernels.memory.copy_in(array, values * (inside.rank + 1))
    joined.add_up(array)
    if not np.array_equal(kernels.memory.to_host(array), values * (inside.size * (inside.size + 1) // 2)):
        raise RuntimeError("a first sum came out wrong")


def _somewhere(inside: Transport, failure: Exception | None) -> bool:
    """Whether a rank has failed; that one says it."""
    if failure is not None:
        logger.warning("gradients are added up within a node in host memory, not by NCCL: %s", failure)
    failed = np.array([float(failure is not None)])
    inside.allreduce(failed, "max")
    return bool(failed[0])
