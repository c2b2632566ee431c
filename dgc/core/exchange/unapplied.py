"""A step that was exchanged but never applied: taken back wholly, or only what was sent in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dgc.core.exchange.bucket import BucketExchange
from dgc.core.exchange.records import StepContext, StepStats
from dgc.core.kernels.base import Kernels
from dgc.core.state.state import State
from dgc.core.transport import Transport
from dgc.errors import ConfigError


class Unapplied:
    """What the latest finished step would have to put back, until it is known to be applied or the next one begins.

    In dense training a gradient that is dropped between the exchange and the update is gone. A compressor has taken it
    into u and v by then, so there are two ways back:

    - exact (``discardable=True``): copies of u, v, what small tensors lack, the memory of the selection and the step,
      made before every step, are put back, as if the step had never been. Takes the memory of u and v once more.
    - otherwise only the entries that were sent return to u and v, as in a refused step, so that nothing is lost: the
      gradient stays in v and is sent later. The step counts, and dense tensors' momentum keeps what it has taken in;
      what their codec lost of it is still owed to that momentum.

    Attributes:
        exact: whether steps can be taken back wholly.
        keeps_sent: whether to keep what was sent; for an adapter that learns whether a step was applied.
        discarded: steps that were taken back wholly; the ranks must share it.
        returned: steps of which only what was sent has come back.
        whole: after a step that failed: whether the state is that from before it.
    """

    def __init__(
        self, state: State, buckets: Sequence[BucketExchange], kernels: Kernels, transport: Transport, *, exact: bool
    ) -> None:
        """Allocate the copies, if steps are to be taken back wholly.

        Args:
            state: of the exchange.
            buckets: of the exchange.
            kernels: that work on the state.
            transport: connects the ranks.
            exact: see the class.
        """
        self.exact = exact
        self.keeps_sent = self.whole = False
        self.discarded = self.returned = 0
        self._state = state
        self._buckets = buckets
        self._transport = transport.whole
        self._memory = kernels.memory
        self._copies: list[tuple[Any, Any, np.ndarray, np.ndarray]] = []
        self._owed: list[bool] = []
        if exact:
            self._allocate()
        self._step = 0
        self._captured = False
        self._sent: StepContext | None = None
        self._pending = False

    @property
    def pending(self) -> bool:
        """Whether the latest step can be taken back."""
        return self._pending

    def settle(self) -> None:
        """The latest step counts from now on."""
        self._pending = self._captured = False
        self._sent = None
        if not self.exact:
            self._copies = []

    def reset(self) -> None:
        """Forget everything; all ranks do it together."""
        self.settle()
        self.discarded = 0

    def capture(self) -> None:
        """Copy the state before a step changes it; only the first call before a step does."""
        if not self.exact or self._captured:
            return
        self.settle()
        self._copy()
        self._captured = True

    def remember(self) -> None:
        """What the state holds now is what the latest step, finished by another exchange, goes back to."""
        self.settle()
        if not self.exact:
            self._allocate()
        self._copy()
        self._pending = True

    def require_agreement(self, stats: StepStats) -> None:
        """Compare the number of discarded steps among the ranks; collective where steps can be discarded.

        A rank that discarded a step which another one applied would exchange messages of another step, which may even
        have another size.

        Args:
            stats: of the step, added to.

        Raises:
            ConfigError: the ranks differ. All ranks get it.
        """
        if not self.exact:
            return
        counts = np.empty((self._transport.size, 8), np.uint8)
        self._transport.allgather(np.array([self.discarded], np.int64).view(np.uint8), counts)
        stats.bytes_sent += 8
        stats.bytes_received += 8 * (self._transport.size - 1)
        found = counts.view(np.int64)[:, 0]
        if (found == found[0]).all():
            return
        other = int(np.flatnonzero(found != found[0])[0])
        raise ConfigError(
            f"rank 0 has discarded {found[0]} steps and rank {other} {found[other]}: a step was discarded on one rank "
            "and applied on another, so their models differ now. Call discard_step(), or zero_grad() without step(), "
            "on all ranks or on none (decide from values that are averaged over the ranks), and go on from a "
            "checkpoint on all ranks"
        )

    def conclude(self, step: StepContext, *, refused: bool) -> None:
        """A step is finished; a refused one has been taken back already."""
        captured = self._captured
        self.settle()
        if refused:
            return
        if captured:
            self._pending = True
        elif self.keeps_sent:
            self._sent = step
            self._pending = True

    def rewind(self) -> None:
        """After a step that failed: what the state was before it; where no copies are made it stays as it is."""
        self.whole = False
        if self.exact and self._captured:
            self._restore()
            self._captured = False
        self.whole = self.exact

    def take_back(self) -> bool:
        """Put back what the latest step changed, as the class says; only once.

        Returns:
            False when there is nothing to take back: no step, or one that was refused or is settled.
        """
        if not self._pending:
            return False
        if self._sent is None:
            self._restore()
            self.discarded += self.exact
        else:
            for each in self._buckets:
                each.return_sent(self._sent)
            self.returned += 1
        self.settle()
        return True

    def _allocate(self) -> None:
        zeros = self._memory.zeros
        self._copies = [
            (zeros(b.u.size, b.u.dtype), zeros(b.v.size, b.v.dtype), np.empty_like(b.control), np.zeros_like(b.error))
            for b in self._state.buckets
        ]

    def _restore(self) -> None:
        for bucket, (u, v, control, error), owed in zip(self._state.buckets, self._copies, self._owed, strict=True):
            self._memory.copy(bucket.u, u)
            self._memory.copy(bucket.v, v)
            bucket.control[...] = control
            bucket.error[...] = error
            bucket.owes = owed
        self._state.step = self._step

    def _copy(self) -> None:
        for bucket, (u, v, control, error) in zip(self._state.buckets, self._copies, strict=True):
            self._memory.copy(u, bucket.u)
            self._memory.copy(v, bucket.v)
            control[...] = bucket.control
            error[...] = bucket.error
        self._owed = [bucket.owes for bucket in self._state.buckets]
        self._step = self._state.step
