"""A tiny allreduce a step, through Horovod, that shows whether all ranks are still exchanging gradients.

A rank that called ``hvd.join()`` takes part in Horovod's allreduces with zeros, but in no exchange of ours: the others
would wait for it for ever, and Horovod's own allgather would end the joined process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dgc.core.errors import ConfigError
from dgc.core.transport import Transport

_instances = itertools.count()

JOINED = (
    "a rank has joined (hvd.join) or skips steps while others still train; give every rank the same number of batches "
    "(repeat or drop some) instead of calling hvd.join()"
)
_TOLERANCE = 1e-12
"""Of a variance over the squared mean: values may differ by some 1e-6, which unlike machines' rounding explains."""


class StandIn:
    """Sends a 1.0 at the beginning of each step; costs no waiting unless the exchange itself is late.

    Where Horovod's collectives are the transport, the sum is awaited before the first of them.
    """

    def __init__(
        self,
        hvd: Any,
        transport: Transport,
        process_set: Any,
        count_bytes: Callable[[int], None] | None = None,
        learning_rates: Callable[[], Sequence[float]] | None = None,
    ) -> None:
        """Every rank of the process set must make its stand-ins in the same order.

        Args:
            hvd: ``horovod.torch``.
            transport: connects the ranks.
            process_set: of Horovod.
            count_bytes: told how many bytes are sent.
            learning_rates: those of the step that begins, by parameter group; they travel along and are compared. As
                many on all ranks.
        """
        self._learning_rates = learning_rates
        self._sent: list[float] = []
        self._hvd = hvd
        self._transport = transport
        self._process_set = process_set
        self._count_bytes = count_bytes
        self._name = f"dgc.stand_in.{next(_instances)}"
        self._handle: int | None = None

    def send(self) -> None:
        """Start this step's allreduce."""
        self._collect()
        values = torch.ones(1)
        if self._learning_rates is not None:
            self._sent = list(self._learning_rates())
            rates = torch.tensor(self._sent, dtype=torch.float64)
            values = torch.cat([values.double(), rates, rates * rates])
        if self._count_bytes is not None:
            self._count_bytes(values.nbytes)
        self._handle = self._hvd.allreduce_async(
            values, name=self._name, op=self._hvd.Sum, process_set=self._process_set
        )

        if self._transport.name == "horovod":
            self._collect()

    def check(self) -> None:
        """Look at the sum if it is there.

        Raises:
            ConfigError: a rank has joined, or the learning rates differ.
        """
        if self._handle is not None and self._hvd.poll(self._handle):
            self._collect()

    def wait(self) -> None:
        """Wait for the sum and look at it; every rank must have begun the step.

        Raises:
            ConfigError: a rank has joined, or the learning rates differ. On all ranks.
        """
        self._collect()

    def _collect(self) -> None:
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        sums = self._hvd.synchronize(handle)
        total = float(sums[0])
        if round(total) != self._transport.size:
            raise ConfigError(f"only {total:g} of {self._transport.size} ranks exchange gradients: {JOINED}")
        count = (len(sums) - 1) // 2
        for group, (rate, square) in enumerate(
            zip(sums[1 : 1 + count].tolist(), sums[1 + count :].tolist(), strict=True)
        ):
            # The same sums on every rank, so the same verdict; a NaN is none that could be trained with.
            mean = rate / total
            if not square / total - mean * mean <= _TOLERANCE * mean * mean:
                raise ConfigError(
                    f"the learning rate of parameter group {group} is not the same number on all ranks: their mean is "
                    f"{mean:.6g}, this rank's is {self._sent[group]:.6g}; the parameters would drift apart. Give every "
                    "rank the same schedule, and decide about it from values that are averaged over the ranks"
                )
