"""Horovod's own collectives as a transport: works wherever Horovod does (MPI, Gloo, with or without NCCL).

P = number of ranks, m = message bytes, n = elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dgc.core.errors import TransportError
from dgc.torch.horovod import gather_values, import_horovod, member_set
from dgc.transport.checks import check_allgather, check_allreduce, reduce_in_rank_order

SMALL_BYTES = 64 * 1024
"""Up to this total an allreduce gathers all arrays and adds them in rank order: one round as well, and exact bits."""

GATHER_BYTES = 4 * 1024 * 1024
"""A maximum of a large array gathers pieces of about this total."""

_instances = itertools.count()
"""Numbers the transports of this process, so that two of them never use the same tensor name at the same time."""


class HorovodTransport:
    """Collectives of ``horovod.torch`` on CPU tensors that share memory with the caller's arrays.

    To be called by one thread at a time, any thread, in the same order on every rank. Tensor names are explicit, equal
    on all ranks and repeat from step to step, so that Horovod's response cache knows them; they contain the size, since
    another first dimension under the same name would miss that cache. One call takes 2 to 4 ms, of which Horovod's
    cycle time and its 1 ms polling are the most.

    An ``allreduce`` gives the same bits on every rank. Small arrays, and every "max", are gathered and folded in rank
    order. Large sums are Horovod's own: Gloo's and NCCL's rings compute each sum on one rank and copy it to the others;
    MPI's algorithms do that too, or let two ranks add the same two numbers, and a+b has the bits of b+a. Horovod may
    fuse a tensor with others that travel at the same time, so these sums can differ in the last bit between two runs.
    """

    name = "horovod"

    def __init__(self, process_set: Any = None, name_prefix: str = "dgc") -> None:
        """Agree on names. Collective over the ranks of ``process_set``.

        Args:
            process_set: a ``hvd.ProcessSet``, or None for all ranks.
            name_prefix: begins all tensor names; shows up in Horovod's timeline and stall warnings.

        Raises:
            ConfigError: Horovod is not ready, or this process is not in ``process_set``.
            TransportError: Horovod's collective failed.
        """
        self._hvd = import_horovod()
        self._process_set = member_set(process_set)
        # A rank may have made transports for other process sets before; the largest number is new to all members.
        numbers = gather_values(next(_instances), "transport.number", self._process_set)
        self._prefix = f"{name_prefix}.{self._process_set.process_set_id}.{max(numbers)}"
        self.rank: int = self._process_set.rank()
        self.size: int = self._process_set.size()
        self._closed = False

    def allgather(self, message: np.ndarray, out: np.ndarray) -> None:
        """Copy every rank's message into ``out``. See :class:`dgc.core.transport.Transport`.

        Args:
            message: (m,) uint8, contiguous.
            out: (P, m) uint8, contiguous, written.

        Raises:
            TransportError: wrong arguments, or Horovod failed.
        """
        self._require_open()
        check_allgather(message, out, self.size)
        if message.size == 0:
            return
        # torch warns about memory it may not write, though nothing writes here.
        tensor = torch.from_numpy(message if message.flags.writeable else message.copy())
        gathered = self._run(self._hvd.allgather_async, tensor, f"allgather.{message.size}")
        if gathered.numel() != out.size:
            raise TransportError(
                f"the ranks gathered messages of different sizes: {gathered.numel()} bytes in all, expected {out.size}"
            )
        np.copyto(out, gathered.numpy().reshape(out.shape))

    def allreduce(self, array: np.ndarray, op: str = "sum") -> None:
        """Reduce ``array`` in place. See :class:`dgc.core.transport.Transport`.

        Args:
            array: (n,) float32 or float64, contiguous, overwritten with the result.
            op: "sum" or "max".

        Raises:
            TransportError: wrong arguments, or Horovod failed.
        """
        self._require_open()
        check_allreduce(array, op)
        if self.size == 1 or array.size == 0:
            return
        if array.nbytes * self.size <= SMALL_BYTES:
            self._gather_and_fold(array, op)
        elif op == "max":
            # Horovod's Max drops or keeps a NaN depending on the order in which ranks are compared.
            step = max(1, GATHER_BYTES // (array.itemsize * self.size))
            for start in range(0, array.size, step):
                self._gather_and_fold(array[start : start + step], op)
        else:
            kind = f"allreduce.{array.dtype.name}.{array.size}"
            self._run(self._hvd.allreduce_async_, torch.from_numpy(array), kind, op=self._hvd.Sum)

    def close(self) -> None:
        """Refuse further collectives. Horovod itself goes on."""
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError("this horovod transport is closed")
        if not self._hvd.is_initialized():
            raise TransportError("Horovod is shut down: stop exchanging before hvd.shutdown()")

    def _gather_and_fold(self, array: np.ndarray, op: str) -> None:
        parts = np.empty((self.size, array.nbytes), np.uint8)
        self.allgather(array.view(np.uint8), parts)
        reduce_in_rank_order(parts.view(array.dtype), op, array)

    def _run(self, start: Callable[..., Any], tensor: torch.Tensor, kind: str, **options: Any) -> torch.Tensor:
        try:
            handle = start(tensor, name=f"{self._prefix}.{kind}", process_set=self._process_set, **options)
            return self._hvd.synchronize(handle)
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"Horovod could not {kind.split('.')[0]} {tensor.numel()} elements: {error}") from error
