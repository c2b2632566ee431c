"""A one-element allreduce a step, through Horovod, that shows whether all ranks are still exchanging gradients.

A rank that called ``hvd.join()`` takes part in Horovod's allreduces with zeros, but in no exchange of ours: the others
would wait for it for ever, and Horovod's own allgather would end the joined process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from dgc.core.errors import ConfigError
from dgc.core.transport import Transport

_instances = itertools.count()

JOINED = (
    "a rank has joined (hvd.join) or skips steps while others still train; give every rank the same number of batches "
    "(repeat or drop some) instead of calling hvd.join()"
)


class StandIn:
    """Sends a 1.0 at the beginning of each step; costs no waiting unless the exchange itself is late.

    Where Horovod's collectives are the transport, the sum is awaited before the first of them.
    """

    def __init__(
        self, hvd: Any, transport: Transport, process_set: Any, count_bytes: Callable[[int], None] | None = None
    ) -> None:
        """Every rank of the process set must make its stand-ins in the same order."""
        self._hvd = hvd
        self._transport = transport
        self._process_set = process_set
        self._count_bytes = count_bytes
        self._name = f"dgc.stand_in.{next(_instances)}"
        self._handle: int | None = None

    def send(self) -> None:
        """Start this step's allreduce."""
        self._collect()
        one = torch.ones(1)
        if self._count_bytes is not None:
            self._count_bytes(one.nbytes)
        self._handle = self._hvd.allreduce_async(one, name=self._name, op=self._hvd.Sum, process_set=self._process_set)

        if self._transport.name == "horovod":
            self._collect()

    def check(self) -> None:
        """Look at the sum if it is there.

        Raises:
            ConfigError: a rank has joined.
        """
        if self._handle is not None and self._hvd.poll(self._handle):
            self._collect()

    def _collect(self) -> None:
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        total = float(self._hvd.synchronize(handle))
        if round(total) != self._transport.size:
            raise ConfigError(f"only {total:g} of {self._transport.size} ranks exchange gradients: {JOINED}")
