"""Large sums by NCCL where Horovod was built with it: of dense steps, and of large tensors that are sent dense."""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np
import torch

from dgc.core.transport import Divisible, Transport
from dgc.errors import TransportError
from dgc.torch.engine.horovod.held import hold
from dgc.torch.engine.horovod.horovod import HOROVOD

logger = logging.getLogger("dgc")

LARGE = 1 << 20
"""Bytes from which a sum is worth two copies over the bus."""
_PROBE = 256


class SummedOnDevices(Transport):
    """A transport whose large sums go by the GPUs, once all ranks have said that theirs can.

    Everything else is the transport's own. ``op="sum"`` of :data:`LARGE` bytes or more is Horovod's allreduce of a copy
    on this rank's device. NCCL computes each sum on one rank and copies it to the others, so all have the same bits;
    Horovod may fuse it with other tensors, so two runs may differ in the last ones. Waiting does not turn on a core.
    """

    def __init__(self, transport: Transport, hvd: ModuleType, members: object) -> None:
        """Leave all sums to ``transport`` for now.

        Args:
            transport: among the ranks of ``members``; is closed with this one.
            hvd: ``horovod.torch``.
            members: the process set.
        """
        self.rank, self.size, self.name = transport.rank, transport.size, transport.name
        self._transport, self._hvd, self._members = transport, hvd, members
        self._sums: _Sums | None = None

    @property
    def divisible(self) -> Divisible | None:
        """See :class:`dgc.core.transport.Transport`."""
        return self._transport.divisible

    def busy(self) -> AbstractContextManager[None]:
        """See :class:`dgc.core.transport.Transport`."""
        return self._transport.busy()

    def end_job(self, error: Exception) -> None:
        """See :class:`dgc.core.transport.Transport`."""
        self._transport.end_job(error)

    def use(self, device: torch.device | None) -> None:
        """Sum on devices from now on, if all ranks can. Collective.

        A first sum, whose outcome is known, has to come out right on all ranks. Where one cannot, large sums stay with
        the transport, and that rank says why.

        Args:
            device: of this rank's gradients; None where they pass through host memory.

        Raises:
            TransportError: a collective of the transport failed.
        """
        if self.size == 1 or self._on_some_rank(device is None):
            return
        assert device is not None
        probe = np.arange(_PROBE, dtype=np.float64) * (self.rank + 1)
        wrong: object = "a sum came out wrong"
        # Whatever may fail on one rank alone comes before the others wait for it in the sum.
        missing = _obstacle(device)
        if missing is not None:
            logger.warning("NCCL is not used, so large dense sums pass through host memory: %s", missing)
        if self._on_some_rank(missing is not None):
            return
        try:
            sums = _Sums(self._hvd, device, self._members)
            sums.add(probe)
        except (TransportError, RuntimeError) as error:
            wrong = error
        failed = not np.array_equal(probe, np.arange(_PROBE) * (self.size * (self.size + 1) / 2))
        if failed:
            logger.warning("NCCL cannot be used here, so large dense sums pass through host memory: %s", wrong)
        if not self._on_some_rank(failed):
            self._sums = sums

    def allgather(self, message: np.ndarray, out: np.ndarray) -> None:
        """See :class:`dgc.core.transport.Transport`."""
        self._transport.allgather(message, out)

    def allreduce(self, array: np.ndarray, op: str = "sum") -> None:
        """See :class:`dgc.core.transport.Transport`; a large sum is quickest where ``array`` is page-locked."""
        if self._sums is not None and op == "sum" and array.nbytes >= LARGE:
            self._sums.add(array)
        else:
            self._transport.allreduce(array, op)

    def close(self) -> None:
        """See :class:`dgc.core.transport.Transport`."""
        self._sums = None
        self._transport.close()

    def _on_some_rank(self, here: bool) -> bool:
        found = np.array([float(here)])
        self._transport.allreduce(found, "max")
        return bool(found[0])


def _obstacle(device: torch.device) -> str | None:
    """Why this rank cannot take part in sums on devices; None where nothing is known to keep it from that."""
    for name in ("HOROVOD_ENABLE_ASYNC_COMPLETION", "HOROVOD_ENABLE_XLA_OPS"):
        if os.environ.get(name, "0") not in ("", "0"):
            # Horovod then says that a sum is done when it has begun, to a stream that is not ours.
            return f"{name} is set"
    try:
        torch.zeros(_PROBE, dtype=torch.float64).to(device)
    except RuntimeError as error:
        return str(error)
    return None


class _Sums:
    """Horovod's allreduce of copies on a device."""

    def __init__(self, hvd: ModuleType, device: torch.device, members: Any) -> None:
        """Agree on names. Collective over ``members``.

        Raises:
            TransportError: Horovod's collective failed.
        """
        self._hvd, self._device, self._members = hvd, device, members
        self._prefix = HOROVOD.unique_name("dgc.sums", members)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def add(self, values: np.ndarray) -> None:
        """Sum ``values``, (n,) float32 or float64 on the host, over all ranks in place. Collective, blocking.

        Raises:
            TransportError: Horovod's collective failed.
        """
        host, hvd = torch.from_numpy(values), self._hvd
        name = f"{self._prefix}.{values.dtype.name}.{values.size}"
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            copy = torch.empty_like(host, device=self._device)
            copy.copy_(host, non_blocking=True)
            holder = hold(copy)
            try:
                hvd.synchronize(hvd.allreduce_async_(copy, name=name, op=hvd.Sum, process_set=self._members))
            except (RuntimeError, ValueError) as error:
                raise TransportError(f"Horovod's collective {name} failed: {error}") from error
            host.copy_(copy, non_blocking=True)
            if self._stream is not None:
                done = torch.cuda.Event(blocking=True)
                done.record(self._stream)
                done.synchronize()
        del holder


def use_devices(transport: Transport, device: torch.device | None) -> None:
    """Let large sums go by the GPUs, where ``transport`` is one that can; see :meth:`SummedOnDevices.use`."""
    if isinstance(transport, SummedOnDevices):
        transport.use(device)
