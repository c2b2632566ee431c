"""The k largest accumulated entries of each tensor, as (index, value) pairs: what DGC sends.

Source: arXiv 1712.01887, Algorithm 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dgc.core.compressors import compressor_class
from dgc.core.config import DGCConfig
from dgc.core.exchange.encoders.base import BucketStep, Encoder
from dgc.core.kernels.base import Array, Kernels, Selection
from dgc.core.layout import Bucket
from dgc.core.message import Incoming
from dgc.core.plan import BucketPlan, Mode, make_plan
from dgc.core.state import BucketState
from dgc.errors import LayoutError, WireError


class TopKEncoder(Encoder):
    """Momentum correction and selection in one pass; masking at the selected places once the step counts."""

    begins_early = True

    def __init__(self, bucket: Bucket, config: DGCConfig, kernels: Kernels, ranks: int) -> None:
        """Allocate nothing; arguments as for :class:`Encoder`."""
        super().__init__(bucket, config, kernels, ranks, keeps_residual=config.error_feedback)
        self._begun: Callable[[], Selection] | None = None

    def _make_plan(self, density: float | None) -> BucketPlan:
        return make_plan(
            self._bucket,
            density=density,
            ranks=self._ranks,
            indices=self._config.indices,
            values="float32" if self._is_exact(density) else self._config.values,
            compressor=compressor_class(self._config.algorithm).number,
            small=self._small(density),
        )

    def begin(self, at: BucketStep) -> None:  # noqa: D102
        at.vector.begin(at.step, at.plan)
        if at.plan.is_active:
            self._begun = self._kernels.begin_selection(self._work(at), at.state.u, at.state.v, at.state.thresholds)

    def abandon(self) -> None:  # noqa: D102
        begun, self._begun = self._begun, None
        if begun is not None:
            begun()

    def compress(self, at: BucketStep) -> None:  # noqa: D102
        plan, state = at.plan, at.state
        at.start_message()
        if not plan.is_active:
            return
        begun, self._begun = self._begun, None
        if begun is not None:
            selection = begun()
        else:
            selection = self._kernels.accumulate_and_select(self._work(at), state.u, state.v, state.thresholds)
        self._write(at, selection.positions, selection.values)
        at.flagged = selection.nonfinite

    def _write(self, at: BucketStep, positions: np.ndarray, values: np.ndarray) -> None:
        """Code the selected entries: (k,) int64, ascending, and (k,)."""
        if at.plan.mode is Mode.SPARSE:
            values = at.plan.codec.encode(positions, values, at.sender.payload)
        else:
            at.vector.values[: self._bucket.sparse_size] = 0
            at.vector.values[positions] = values
        at.sent, at.count = (positions, values), len(positions)

    def apply(self, at: BucketStep, messages: Sequence[Incoming], share: float) -> None:  # noqa: D102
        self._put(at, self._read(at, messages), share * at.step.loss_scale)

    def _read(self, at: BucketStep, messages: Sequence[Incoming]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Each rank's positions and values."""
        entries = []
        for message in messages:
            try:
                entries.append(at.plan.codec.decode(message.payload, message.count))
            except (WireError, LayoutError) as error:
                raise message.damaged(error) from error
        return entries

    def commit(self, at: BucketStep, state: BucketState) -> Array | None:  # noqa: D102
        if at.sent is None:
            return None
        positions, values = at.sent
        masking = self._masks(sum(at.plan.ks))
        self._kernels.mask(state.u, state.v, positions, values, masking=masking)
        if not self._keeps_residual:
            self._memory.fill(state.v, 0)
        return positions
