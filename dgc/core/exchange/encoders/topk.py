"""The k largest accumulated entries of each tensor, as (index, value) pairs: what DGC sends.

Source: arXiv 1712.01887, Algorithm 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dgc.core.compressors.registry import compressor_class
from dgc.core.config.config import DGCConfig
from dgc.core.exchange.encoders.base import (
    BucketStep,
    Encoder,
    is_active,
    masks,
    put_entries,
    segment_work,
    small_codec,
    why_empty,
)
from dgc.core.exchange.records import SentEntries, StepContext, bounds_of
from dgc.core.kernels.base import Array, Kernels, Selection
from dgc.core.state.layout import Bucket
from dgc.core.state.state import BucketState
from dgc.core.wire.message import Incoming, blaming
from dgc.core.wire.plan import BucketPlan, Mode, make_plan


class TopKEncoder(Encoder):
    """Momentum correction and selection in one pass; masking at the selected places once the step counts."""

    begins_early = True

    def __init__(self, bucket: Bucket, config: DGCConfig, kernels: Kernels, ranks: int) -> None:
        """Allocate nothing."""
        self._bucket = bucket
        self._config = config
        self._kernels = kernels
        self._memory = kernels.memory
        self._ranks = ranks
        self._plans: dict[float | None, BucketPlan] = {}
        self._begun: Callable[[], Selection] | None = None

    def plan(self, step: StepContext) -> BucketPlan:  # noqa: D102
        return self.plan_at(step.density)

    def plan_at(self, density: float | None) -> BucketPlan:  # noqa: D102
        if density not in self._plans:
            self._plans[density] = make_plan(
                self._bucket,
                density=density,
                ranks=self._ranks,
                indices=self._config.indices,
                values=self._config.values,
                compressor=compressor_class(self._config.algorithm).number,
                small=small_codec(self._config, density),
            )
        return self._plans[density]

    def begin(self, at: BucketStep) -> None:  # noqa: D102
        if is_active(at.plan, at.plan.ks):
            work = segment_work(self._bucket, self._config, at, self._ranks)
            self._begun = self._kernels.begin_selection(work, at.state.u, at.state.v, at.state.thresholds)

    def abandon(self) -> None:  # noqa: D102
        begun, self._begun = self._begun, None
        if begun is not None:
            begun()

    def compress(self, at: BucketStep) -> None:  # noqa: D102
        plan, state, outcome = at.plan, at.state, at.outcome
        at.buffers.start(at.step, plan)
        if not is_active(plan, plan.ks):
            return
        begun, self._begun = self._begun, None
        if begun is not None:
            selection = begun()
        else:
            work = segment_work(self._bucket, self._config, at, self._ranks)
            selection = self._kernels.accumulate_and_select(work, state.u, state.v, state.thresholds)
        positions, values = selection.positions, selection.values
        if plan.mode is Mode.SPARSE:
            decoded = plan.codec.encode(positions, values, at.buffers.payload)
        else:
            decoded = plan.codec.roundtrip(positions, values)
            vector = at.buffers.vector.values
            vector[: self._bucket.sparse_size] = 0
            vector[positions] = decoded
        outcome.sent = SentEntries(positions, decoded)
        outcome.count, outcome.flagged = len(positions), selection.nonfinite

    def apply(self, at: BucketStep, messages: Sequence[Incoming], share: float) -> None:  # noqa: D102
        entries = []
        for message in messages:
            with blaming(message.who, self._bucket.index):
                entries.append(at.plan.codec.decode(message.payload, message.count))
                bounds_of(self._bucket, entries[-1][0])
        self._put(at, entries, share * at.step.loss_scale)

    def _put(self, at: BucketStep, entries: Sequence[tuple[Any, Any]], factor: float) -> None:
        """Add up what came, and write or defer it."""
        put_entries(at, self._bucket, entries, factor, self._kernels)

    def finish(self, at: BucketStep, *, refused: bool) -> None:  # noqa: D102
        if not self._config.error_feedback and is_active(at.plan, at.plan.ks):
            self._memory.fill(at.state.v, 0)

    def commit(self, at: BucketStep, state: BucketState) -> Array | None:  # noqa: D102
        sent = at.outcome.sent
        if sent is None:
            return None
        masking = masks(self._config, sum(at.plan.ks), sum(s.length for s in self._bucket.sparse))
        self._mask(at.plan, state, sent, masking)
        if not self._config.error_feedback:
            self._memory.fill(state.v, 0)
        return sent.positions

    def _mask(self, plan: BucketPlan, state: BucketState, sent: SentEntries, masking: bool) -> None:
        self._kernels.mask(state.u, state.v, sent.positions, sent.values, masking=masking)

    def why_empty(self, at: BucketStep) -> str | None:  # noqa: D102
        return why_empty(is_active(at.plan, at.plan.ks), self._config.error_feedback, self._config.algorithm)
