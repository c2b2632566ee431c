"""The k largest accumulated entries of each tensor, as (index, value) pairs: what DGC sends.

Source: arXiv 1712.01887, Algorithm 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dgc.core.compressors.registry import compressor_class
from dgc.core.config.config import DGCConfig
from dgc.core.exchange.encoders.base import (
    Buffers,
    Encoder,
    is_active,
    masks,
    put_entries,
    segment_work,
    small_codec,
    why_empty,
)
from dgc.core.exchange.records import Outcome, SentEntries, StepContext, bounds_of
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
        self._kernels: Any = kernels
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

    def begin(self, step: StepContext, plan: BucketPlan, state: BucketState, buffers: Buffers) -> None:  # noqa: D102
        if is_active(plan, plan.ks):
            work = segment_work(self._bucket, self._config, step, plan, self._ranks)
            self._begun = self._kernels.begin_selection(work, state.u, state.v, state.thresholds)

    def abandon(self) -> None:  # noqa: D102
        begun, self._begun = self._begun, None
        if begun is not None:
            begun()

    def compress(  # noqa: D102
        self, step: StepContext, plan: BucketPlan, state: BucketState, buffers: Buffers, outcome: Outcome
    ) -> BucketPlan:
        buffers.start(step, plan)
        if not is_active(plan, plan.ks):
            return plan
        begun, self._begun = self._begun, None
        if begun is not None:
            selection = begun()
        else:
            work = segment_work(self._bucket, self._config, step, plan, self._ranks)
            selection = self._kernels.accumulate_and_select(work, state.u, state.v, state.thresholds)
        positions, values = selection.positions, selection.values
        if plan.mode is Mode.SPARSE:
            decoded = plan.codec.encode(positions, values, buffers.payload)
        else:
            decoded = plan.codec.roundtrip(positions, values)
            vector = buffers.vector.values
            vector[: self._bucket.sparse_size] = 0
            vector[positions] = decoded
        outcome.sent = SentEntries(positions, decoded)
        outcome.count, outcome.flagged = len(positions), selection.nonfinite
        return plan

    def apply(  # noqa: D102
        self, step: StepContext, plan: BucketPlan, messages: Sequence[Incoming], share: float, outcome: Outcome
    ) -> None:
        entries = []
        for message in messages:
            with blaming(message.who, self._bucket.index):
                entries.append(plan.codec.decode(message.payload, message.count))
                bounds_of(self._bucket, entries[-1][0])
        self._put(step, entries, share * step.loss_scale, outcome)

    def _put(self, step: StepContext, entries: Sequence[tuple[Any, Any]], factor: float, outcome: Outcome) -> None:
        """What came is added up, and written or deferred."""
        put_entries(step, self._bucket, entries, factor, self._kernels, outcome)

    def finish(self, step: StepContext, plan: BucketPlan, state: BucketState, *, refused: bool) -> None:  # noqa: D102
        if not self._config.error_feedback and is_active(plan, plan.ks):
            self._memory.fill(state.v, 0)

    def commit(  # noqa: D102
        self, step: StepContext, plan: BucketPlan, state: BucketState, outcome: Outcome
    ) -> Array | None:
        if outcome.sent is None:
            return None
        masking = masks(self._config, sum(plan.ks), sum(s.length for s in self._bucket.sparse))
        self._mask(plan, state, outcome.sent, masking)
        if not self._config.error_feedback:
            self._memory.fill(state.v, 0)
        return outcome.sent.positions

    def _mask(self, plan: BucketPlan, state: BucketState, sent: SentEntries, masking: bool) -> None:
        self._kernels.mask(state.u, state.v, sent.positions, sent.values, masking=masking)

    def why_empty(self, step: StepContext, plan: BucketPlan) -> str | None:  # noqa: D102
        return why_empty(is_active(plan, plan.ks), self._config.error_feedback, self._config.algorithm)
