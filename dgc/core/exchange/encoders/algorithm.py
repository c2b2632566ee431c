"""Compressors that are an :class:`~dgc.core.compressors.base.Algorithm`: residual and gradient together are encoded.

Works on host arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dgc.core.codecs import padded
from dgc.core.compressors.base import Algorithm, BucketSpec, DenseValues, SparseValues, StepInfo, Tensor
from dgc.core.exchange.encoders.base import BucketStep, Encoder
from dgc.core.exchange.encoders.dense_vector import is_finite
from dgc.core.exchange.records import StepContext
from dgc.core.kernels.base import Array, Kernels
from dgc.core.layout import Bucket, Layout
from dgc.core.message import Incoming
from dgc.core.plan import BucketPlan, Mode, plan_for
from dgc.core.state import BucketState
from dgc.core.transport import Transport
from dgc.errors import ConfigError, LayoutError, WireError


class AlgorithmEncoder(Encoder):
    """Accumulates, then lets an algorithm write the message.

    Where the ranks share something before encoding, an allreduce of it comes before the message.
    """

    def __init__(
        self, bucket: Bucket, algorithm: Algorithm, kernels: Kernels, transport: Transport, layout: Layout
    ) -> None:
        """Allocate nothing yet; the algorithm is shared by all buckets of the model, which has this layout.

        Raises:
            ConfigError: the kernels work on a device.
        """
        if kernels.on_device:
            raise ConfigError(f"{algorithm.name!r} works on host memory; give it the kernels of the CPU")
        keeps = algorithm.error_feedback and algorithm.config.error_feedback
        super().__init__(bucket, algorithm.config, kernels, transport.size, keeps_residual=keeps)
        self._algorithm = algorithm
        self._transport = transport
        self._tensors = tuple(
            Tensor(layout.parameters[s.parameter].name, layout.parameters[s.parameter].shape, s.offset, s.length)
            for s in bucket.sparse
        )
        self._total = layout.sparse_numel
        self._specs: dict[float, BucketSpec] = {}
        self._own = np.empty(0, np.uint8)
        self._count_sent = 0
        self._shared_in: StepContext | None = None

    def _make_plan(self, density: float | None) -> BucketPlan:
        spec = self._spec(1.0 if density is None else density)
        algorithm, active = self._algorithm, density is not None and bool(self._tensors)
        indices, values = algorithm.codec_ids(spec) if active else (0, 0)
        return plan_for(
            self._bucket,
            (algorithm.number, indices, values),
            algorithm.max_counts(spec) if active else (),
            padded(algorithm.max_bytes(spec)) if active else 0,
            density=density,
            ranks=self._ranks,
            small=self._small(density),
        )

    def compress(self, at: BucketStep) -> None:  # noqa: D102
        step, plan, state = at.step, at.plan, at.state
        if not plan.is_active:
            at.start_message()
            return
        algorithm, spec = self._algorithm, self._spec(plan.density)
        info = StepInfo(step.step, self._transport.rank, self._config.seed, state.thresholds)
        at.flagged = self._accumulate(at, info)
        if algorithm.shares:
            info.shared = self._share(step, self._prepare(state, spec))
        at.start_message()
        if plan.mode is Mode.SPARSE:
            self._own = at.sender.payload
        elif self._own.size != padded(algorithm.max_bytes(spec)):
            self._own = self._memory.host_array(padded(algorithm.max_bytes(spec)), np.uint8)
        at.count, used = self._encode(state, spec, info)
        self._own[used:] = 0
        self._count_sent = at.count
        if plan.mode is Mode.SUM:
            self._fill_vector(at.vector.values, spec)

    def catch_up(self, at: BucketStep) -> None:  # noqa: D102
        if at.plan.is_active and self._algorithm.shares and self._shared_in is not at.step:
            self._share(at.step, np.zeros(len(self._tensors)))

    def apply(self, at: BucketStep, messages: Sequence[Incoming], share: float) -> None:  # noqa: D102
        spec, factor = self._spec(at.plan.density), share * at.step.loss_scale
        decoded = [self._decode(message, spec) for message in messages]
        entries = [(each.positions, each.values) for each in decoded if isinstance(each, SparseValues)]
        if len(entries) == len(decoded):
            self._put(at, entries, factor)
            return
        results = [item.result for item in at.step.submissions.of(self._bucket.sparse)]
        for result in results:
            result.fill(0)
        for each in decoded:
            if isinstance(each, SparseValues):
                self._kernels.scatter_add(results, self._bucket.sparse_offsets, each.positions, each.values, factor)
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                for result, values in zip(results, each.values, strict=True):
                    result += values * result.dtype.type(factor)
        at.flagged = not all(is_finite(result) for result in results)

    def finish(self, at: BucketStep, *, refused: bool) -> None:  # noqa: D102
        if at.plan.is_active:
            self._algorithm.finish(self._spec(at.plan.density), at.state.thresholds, refused=refused)
        super().finish(at, refused=refused)

    def commit(self, at: BucketStep, state: BucketState) -> Array | None:  # noqa: D102
        return self._subtract(at.plan, state) if self._keeps_residual and at.plan.is_active else None

    # -- inside --------------------------------------------------------------------------------------------------

    def _accumulate(self, at: BucketStep, info: StepInfo) -> bool:
        """Add the gradients to u and v; returns whether one is not finite."""
        state, work = at.state, self._work(at)
        if not self._algorithm.needs_increment:
            return self._kernels.accumulate(work, state.u, state.v)
        info.increment = np.zeros_like(state.v)
        nonfinite = self._kernels.accumulate(work, state.u, info.increment)
        with np.errstate(over="ignore"):
            state.v += info.increment
        if is_finite(state.v):
            return nonfinite
        state.v[~np.isfinite(state.v)] = 0
        return True

    def _prepare(self, state: BucketState, spec: BucketSpec) -> np.ndarray:
        """What the ranks share before they encode, (S,)."""
        return self._algorithm.prepare(state.v, spec)

    def _encode(self, state: BucketState, spec: BucketSpec, info: StepInfo) -> tuple[int, int]:
        """Write this rank's own message; returns entries and bytes."""
        return self._algorithm.encode(state.v, self._own, spec, info)

    def _share(self, step: StepContext, numbers: np.ndarray) -> np.ndarray:
        """The largest of all ranks of each number."""
        shared = np.ascontiguousarray(numbers, np.float64)
        self._transport.allreduce(shared, "max")
        self._shared_in = step
        step.stats.count_collective(shared.nbytes)
        return shared

    def _fill_vector(self, vector: np.ndarray, spec: BucketSpec) -> None:
        """Turn this rank's own message into a vector for the dense sum."""
        decoded = self._algorithm.decode(self._own, self._count_sent, spec)
        vector[: spec.size] = 0
        if isinstance(decoded, SparseValues):
            vector[decoded.positions] = decoded.values
            return
        for tensor, values in zip(self._tensors, decoded.values, strict=True):
            vector[tensor.slice] = values

    def _subtract(self, plan: BucketPlan, state: BucketState) -> Array | None:
        """Subtract this rank's own message from v, and clear u where entries were sent, with masking."""
        spec = self._spec(plan.density)
        decoded = self._algorithm.decode(self._own, self._count_sent, spec)
        if isinstance(decoded, SparseValues):
            late = not self._algorithm.has_room_for_all(spec)
            masking = late and self._masks(len(decoded.positions))
            self._kernels.mask(state.u, state.v, decoded.positions, decoded.values, masking=masking)
            return decoded.positions
        for tensor, values in zip(self._tensors, decoded.values, strict=True):
            state.v[tensor.slice] -= values
        return None

    def _decode(self, message: Incoming, spec: BucketSpec) -> SparseValues | DenseValues:
        try:
            return self._algorithm.decode(message.payload, message.count, spec)
        except (WireError, LayoutError) as error:
            raise message.damaged(error) from error

    def _spec(self, density: float | None) -> BucketSpec:
        assert density is not None
        if density not in self._specs:
            self._specs[density] = BucketSpec(self._bucket, self._tensors, density, self._total)
        return self._specs[density]
