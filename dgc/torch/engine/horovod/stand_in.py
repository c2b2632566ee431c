"""A one-element allreduce a step, through Horovod, that shows whether all ranks are still exchanging gradients.

A rank that called ``hvd.join()`` takes part in Horovod's allreduces with zeros, but in no exchange of ours: the others
would wait for it for ever, and Horovod's own allgather would end the joined process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dgc.adapter.horovod import JOINED
from dgc.core.transport import Transport
from dgc.errors import ConfigError
from dgc.torch.engine.horovod.horovod import HOROVOD


class StandIn:
    """Sends a 1.0 at the beginning of each step; costs no waiting unless the exchange itself is late.

    Where Horovod's collectives are the transport, the sum is awaited before the first of them.
    """

    def __init__(
        self, hvd: Any, transport: Transport, process_set: Any, count_bytes: Callable[[int], None] | None = None
    ) -> None:
        """Agree on a name. Collective over the ranks of ``process_set``.

        Args:
            hvd: ``horovod.torch``.
            transport: of the exchange; names the number of ranks.
            process_set: whose ranks exchange.
            count_bytes: is told what is sent, if given.

        Raises:
            TransportError: Horovod's collective failed.
        """
        self._hvd = hvd
        self._transport = transport
        self._process_set = process_set
        self._count_bytes = count_bytes
        self._name = HOROVOD.unique_name("dgc.stand_in", process_set)
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
