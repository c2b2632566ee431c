"""A one-element allreduce a step, through Horovod, that shows whether all ranks are still exchanging gradients.

A rank that called ``hvd.join()`` takes part in Horovod's allreduces with zeros, but in no exchange of ours: the others
would wait for it for ever, and Horovod's own allgather would end the joined process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import NoReturn

import torch

from dgc.adapter.horovod import JOINED, SHUT_DOWN
from dgc.core.exchange.records import Stats
from dgc.core.transport import Transport
from dgc.errors import ConfigError, StallError, TransportError
from dgc.torch.engine.horovod.held import hold
from dgc.torch.engine.horovod.horovod import HOROVOD
from dgc.transport.choice import ProcessSet
from dgc.transport.waits.mpi_stall import LIMIT_VARIABLE, longest_wait

_PATIENCE = 1.0
"""Seconds that the sum of the step before is waited for. A rank that is missing is waited for in the exchange, which
can say which one it is."""

_NAP = 0.5e-3


class Heartbeat:
    """Sends a 1.0 at the beginning of each step; costs no waiting unless the exchange itself is late.

    Where Horovod's collectives are the transport, the sum is awaited before the first of them, for no longer than
    ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`` where that is set: Horovod's own inspector does not look at an operation
    that is in the ranks' caches, as this one is after the first step.
    """

    def __init__(
        self, hvd: ModuleType, transport: Transport, process_set: ProcessSet, stats: Callable[[], Stats] | None = None
    ) -> None:
        """Agree on a name. Collective over the ranks of ``process_set``.

        Args:
            hvd: ``horovod.torch``.
            transport: of the exchange; names the number of ranks.
            process_set: whose ranks exchange.
            stats: returns the counters that include what is sent, if given.

        Raises:
            TransportError: Horovod's collective failed.
            ConfigError: the longest wait in the environment is no number of seconds.
        """
        self._limit = longest_wait(LIMIT_VARIABLE, 0.0)
        self._hvd = hvd
        self._transport = transport
        self._process_set = process_set
        self._stats = stats
        self._name = HOROVOD.unique_name("dgc.heartbeat", process_set)
        self._handle: int | None = None
        self._pending = 0  # heartbeats of steps that have begun, which could not be sent yet
        self._one = torch.ones(1)
        self._holder = hold(self._one)

    def send(self) -> None:
        """Start this step's allreduce; later, if that of an earlier step is not over.

        Raises:
            ConfigError: a rank has joined.
            StallError: Horovod's collectives are the transport, and a rank has not come for too long.
            TransportError: Horovod failed, or was shut down.
        """
        self._pending += 1
        self._send_pending()
        if self._transport.name != "horovod":
            return
        deadline = time.monotonic() + self._limit
        while not self._is_over(waits=self._limit == float("inf")):
            if time.monotonic() > deadline:
                raise StallError(
                    f"rank {self._hvd.rank()} gives up at the beginning of a step: it has waited {self._limit:g} s for "
                    "a rank that does not come: it is busy with something else (a checkpoint that it saves alone, an "
                    "evaluation), stopped, or cut off. Every step, save_checkpoint() and load must come on all ranks, "
                    f"in the same order. {LIMIT_VARIABLE} is the longest wait in seconds (0: for ever)"
                )
            time.sleep(_NAP)

    def check(self, all_came: bool = False) -> None:
        """Look at the sum if it is there.

        Args:
            all_came: all ranks are in this step, so that every sum is under way. What is pending is then sent before
                the caller goes on: Horovod names an operation without a name by counting, on each rank for itself, and
                a rank that lags behind would wait for ever in the user's next one.

        Raises:
            ConfigError: a rank has joined.
            TransportError: Horovod failed, or was shut down.
        """
        self._send_pending(all_came)
        self._is_over()

    def _send_pending(self, patient: bool = False) -> None:
        deadline = time.monotonic() + _PATIENCE
        while self._pending:
            while not self._is_over():
                if not patient and time.monotonic() > deadline:
                    return
                time.sleep(_NAP)
            one = self._one.fill_(1.0)
            if self._stats is not None:
                self._stats().beside += one.nbytes
            try:
                self._handle = self._hvd.allreduce_async_(
                    one, name=self._name, op=self._hvd.Sum, process_set=self._process_set
                )
            except (ValueError, TypeError) as error:
                self._explain(error)
            self._pending -= 1

    def _is_over(self, waits: bool = False) -> bool:
        """Whether no sum is under way; one that is there is compared with the number of ranks."""
        if self._handle is None:
            return True
        try:
            if not (waits or self._hvd.poll(self._handle)):
                return False
            handle, self._handle = self._handle, None
            total = float(self._hvd.synchronize(handle))
        except (ValueError, TypeError) as error:
            self._explain(error)
        if round(total) != self._transport.size:
            raise ConfigError(f"only {total:g} of {self._transport.size} ranks exchange gradients: {JOINED}")
        return True

    def _explain(self, error: Exception) -> NoReturn:
        """After a shutdown Horovod itself speaks of a handle that was not created."""
        if self._hvd.is_initialized():
            raise error
        raise TransportError(SHUT_DOWN) from error
