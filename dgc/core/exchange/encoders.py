"""Encoders turn a bucket's sparsified tensors into the payload of a message, and read payloads.

:class:`TopKEncoder` sends the k largest accumulated entries of each tensor, as DGC does (Source: arXiv 1712.01887,
Algorithm 4). :class:`AlgorithmEncoder` lets any other compressor write the payload.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from typing_extensions import override

from dgc.core.codecs import SparseCodec, padded
from dgc.core.collectives import Transport
from dgc.core.compressors import OWN_NUMBERS, compressor_class
from dgc.core.compressors.base import Algorithm, BucketSpec, DenseValues, SparseValues, StepInfo, Tensor
from dgc.core.config import DGCConfig, entries_to_send
from dgc.core.exchange.step import Step
from dgc.core.kernels.base import Kernels, SegmentWork, Selection, is_finite
from dgc.core.layout import Bucket, Layout
from dgc.core.message import BucketPlan, Dealing, Mode, plan_for
from dgc.core.state import BucketState
from dgc.core.stripes import Stripes
from dgc.errors import ConfigError

# Owners add up entries if this takes at most this share of the bytes of gathering. A smaller saving does not pay for a
# second collective and a second rounding.
OWNERS_SHARE = 0.6


class Encoder(ABC):
    """Codes the sparsified tensors of one bucket. Only the communication thread uses it.

    Attributes:
        keeps_residual: whether entries that are not sent stay in the residual.
    """

    def __init__(
        self, bucket: Bucket, config: DGCConfig, kernels: Kernels, transport: Transport, *, keeps_residual: bool
    ) -> None:
        self._bucket, self._config, self._kernels, self._transport = bucket, config, kernels, transport
        self._ranks = transport.size
        self.keeps_residual = keeps_residual
        self._elements = sum(s.length for s in bucket.sparse)
        self._plans: dict[float | None, BucketPlan] = {}

    def plan_at(self, density: float | None) -> BucketPlan:
        """Return the plan for a density, or for a dense step (None). Every rank has the same plan."""
        if density not in self._plans:
            self._plans[density] = self._make_plan(density)
        return self._plans[density]

    @property
    def stripes(self) -> Stripes | None:
        """The positions that this rank owns; None if no plan so far has owners."""
        dealings = (plan.dealing for plan in self._plans.values() if plan.dealing)
        return next((each.stripes[self._transport.rank] for each in dealings), None)

    @abstractmethod
    def _make_plan(self, density: float | None) -> BucketPlan: ...

    # -- a step, whose plan is active ---------------------------------------------------------------------------------

    def begin(self, work: Sequence[SegmentWork], state: BucketState) -> Callable[[], Selection] | None:
        """If possible, let other threads or a device begin this work while this thread works on another bucket.

        Returns:
            A function for :meth:`encode`; it must be called once, whatever happens.
        """
        return None

    @abstractmethod
    def encode(
        self, plan: BucketPlan, step: Step, work: Sequence[SegmentWork], state: BucketState, payload: np.ndarray,
        begun: Callable[[], Selection] | None,
    ) -> tuple[int, bool]:  # fmt: skip
        """Add the gradients to u and v, select, and write the payload.

        Args:
            plan: the plan. If its mode is SUM, or owners add up entries, no payload is written, and the entries that
                :meth:`own` returns are sent instead.
            step: the step.
            work: the kernels' work on each tensor.
            state: the bucket's state. Only u, v and the thresholds change before the commit.
            payload: (plan.payload_bytes,) uint8.
            begun: from :meth:`begin`.

        Returns:
            The number of entries, and whether a gradient is not finite.
        """

    def catch_up(self, step: Step) -> None:
        """After an error, call the collectives of :meth:`encode` that this rank has missed and the others call."""
        return

    @abstractmethod
    def selected(self, plan: BucketPlan) -> SparseValues | DenseValues:
        """Return this step's entries. If they were coded, the values are the decoded ones."""

    @abstractmethod
    def decode(self, plan: BucketPlan, payload: np.ndarray, count: int) -> SparseValues | DenseValues:
        """Read a payload with ``count`` entries.

        Raises:
            WireError: the payload is damaged.
            LayoutError: a position lies in no tensor.
        """

    def masks(self, plan: BucketPlan, count: int) -> bool:
        """Return whether u is set to 0 at the ``count`` entries that were sent, to forget stale momentum.

        If all entries were sent, no momentum is stale.
        """
        return self._config.masks and count < self._elements

    def finish(self, plan: BucketPlan, state: BucketState, *, refused: bool) -> None:
        """End a step, refused or not."""
        return


class TopKEncoder(Encoder):
    """Momentum correction and selection in one pass."""

    _selected: SparseValues

    def _make_plan(self, density: float | None) -> BucketPlan:
        return entry_plan(self._bucket, self._config, density, self._ranks, has_alltoall=self._transport.has_alltoall)

    @override
    def begin(self, work: Sequence[SegmentWork], state: BucketState) -> Callable[[], Selection]:
        return self._kernels.begin_selection(work, state.u, state.v, state.thresholds)

    @override
    def encode(
        self, plan: BucketPlan, step: Step, work: Sequence[SegmentWork], state: BucketState, payload: np.ndarray,
        begun: Callable[[], Selection] | None,
    ) -> tuple[int, bool]:  # fmt: skip
        selection = (begun or self.begin(work, state))()
        positions, values = selection.positions, selection.values
        if plan.mode is Mode.SPARSE and plan.dealing is None:
            values = plan.codec.encode(positions, values, payload)
        self._selected = SparseValues(positions, values)
        return len(positions), selection.nonfinite

    @override
    def selected(self, plan: BucketPlan) -> SparseValues:
        return self._selected

    @override
    def decode(self, plan: BucketPlan, payload: np.ndarray, count: int) -> SparseValues:
        return SparseValues(*plan.codec.decode(payload, count))

    @override
    def masks(self, plan: BucketPlan, count: int) -> bool:
        return super().masks(plan, sum(plan.ks))  # entries that are 0 are not sent


class AlgorithmEncoder(Encoder):
    """Accumulates gradients, then lets a compressor write the payload.

    Before it can encode, a compressor may need the maximum of some numbers over the ranks. This costs an allreduce.
    """

    def __init__(
        self, bucket: Bucket, algorithm: Algorithm, kernels: Kernels, transport: Transport, layout: Layout
    ) -> None:
        if kernels.on_device:
            raise ConfigError(f"{algorithm.name!r} works on host memory; give it the kernels of the CPU")
        keeps = algorithm.error_feedback and algorithm.config.error_feedback
        super().__init__(bucket, algorithm.config, kernels, transport, keeps_residual=keeps)
        self._algorithm = algorithm
        self._tensors = tuple(
            Tensor(layout.parameters[s.parameter].name, layout.parameters[s.parameter].shape, s.offset, s.length)
            for s in bucket.sparse
        )
        self._total = layout.sparse_numel
        self._specs: dict[float, BucketSpec] = {}
        self._room = np.empty(0, np.uint8)  # for a payload that is not sent
        self._written = self._room, 0  # the last payload, and its number of entries
        self._caught_up: Step | None = None  # the last step in which this rank has called the allreduce

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
            small="float32" if _is_exact(self._config, density) else self._config.small,
        )

    @override
    def encode(
        self, plan: BucketPlan, step: Step, work: Sequence[SegmentWork], state: BucketState, payload: np.ndarray,
        begun: Callable[[], Selection] | None,
    ) -> tuple[int, bool]:  # fmt: skip
        algorithm, spec = self._algorithm, self._spec(plan.density)
        info = StepInfo(step.number, self._transport.rank, self._config.seed, state.thresholds)
        nonfinite = self._accumulate(work, state, info)
        if algorithm.shares:
            info.shared = self._largest(step, algorithm.prepare(state.v, spec))
        if plan.mode is Mode.SUM:
            if self._room.size != padded(algorithm.max_bytes(spec)):
                self._room = self._kernels.memory.host_array(padded(algorithm.max_bytes(spec)), np.uint8)
            payload = self._room
        count, used = algorithm.encode(state.v, payload, spec, info)
        payload[used:] = 0
        self._written = payload, count
        return count, nonfinite

    @override
    def catch_up(self, step: Step) -> None:
        if self._algorithm.shares and self._caught_up is not step:
            self._largest(step, np.zeros(len(self._tensors)))

    @override
    def selected(self, plan: BucketPlan) -> SparseValues | DenseValues:
        return self.decode(plan, *self._written)

    @override
    def decode(self, plan: BucketPlan, payload: np.ndarray, count: int) -> SparseValues | DenseValues:
        return self._algorithm.decode(payload, count, self._spec(plan.density))

    @override
    def masks(self, plan: BucketPlan, count: int) -> bool:
        return super().masks(plan, count) and not self._algorithm.has_room_for_all(self._spec(plan.density))

    @override
    def finish(self, plan: BucketPlan, state: BucketState, *, refused: bool) -> None:
        self._algorithm.finish(self._spec(plan.density), state.thresholds, refused=refused)

    # -- inside --------------------------------------------------------------------------------------------------

    def _accumulate(self, work: Sequence[SegmentWork], state: BucketState, info: StepInfo) -> bool:
        if not self._algorithm.needs_increment:
            return self._kernels.accumulate(work, state.u, state.v)
        info.increment = np.zeros_like(state.v)
        nonfinite = self._kernels.accumulate(work, state.u, info.increment)
        state.v += info.increment
        if is_finite(state.v):
            return nonfinite
        state.v[~np.isfinite(state.v)] = 0
        return True

    def _largest(self, step: Step, numbers: np.ndarray) -> np.ndarray:
        largest = np.ascontiguousarray(numbers, np.float64)
        self._transport.allreduce(largest, "max")
        self._caught_up = step
        step.stats.count_collective(largest.nbytes)
        return largest

    def _spec(self, density: float | None) -> BucketSpec:
        assert density is not None
        if density not in self._specs:
            self._specs[density] = BucketSpec(self._bucket, self._tensors, density, self._total)
        return self._specs[density]


def make_encoders(layout: Layout, config: DGCConfig, kernels: Kernels, transport: Transport) -> list[Encoder]:
    """Return the encoder of each bucket of the layout, with the plans of all densities of the schedule."""
    algorithm = None if kernels_select(config) else compressor_class(config.algorithm)(config)
    made: list[Encoder] = []
    for bucket in layout.buckets:
        made.append(
            TopKEncoder(bucket, config, kernels, transport, keeps_residual=config.error_feedback)
            if algorithm is None
            else AlgorithmEncoder(bucket, algorithm, kernels, transport, layout)
        )
        for sparsity in config.sparsity:
            made[-1].plan_at(1.0 - sparsity)
    return made


def entry_plan(
    bucket: Bucket, config: DGCConfig, density: float | None, ranks: int, *, has_alltoall: bool = True
) -> BucketPlan:
    """Return how dgc and topk send a bucket over a transport, with or without alltoall."""
    values, small = ("float32", "float32") if _is_exact(config, density) else (config.value_codec, config.small)
    ks = () if density is None else tuple(entries_to_send(s.length, density) for s in bucket.sparse)
    selection = SparseCodec(bucket, sum(ks), config.indices, values)

    def plan(codec: SparseCodec, dealing: Dealing | None = None) -> BucketPlan:
        ids = (compressor_class(config.algorithm).number, int(codec.indices.id), int(codec.values.id))
        return plan_for(
            bucket,
            ids,
            ks,
            codec.max_bytes,
            density=density,
            ranks=ranks,
            small=small,
            selection=selection,
            dealing=dealing,
        )

    gathered = plan(selection)
    if not (has_alltoall and config.exchange == "auto" and ks and ranks > 1):
        return gathered
    dealing = Dealing(bucket, ks, ranks, config.indices, values, small)
    owners = plan(dealing.second[0], dealing)
    return owners if owners.traffic(ranks).nbytes <= OWNERS_SHARE * gathered.traffic(ranks).nbytes else gathered


def _is_exact(config: DGCConfig, density: float | None) -> bool:
    """Return whether tensors are sent uncompressed: in dense steps, and always if sparsity is 0."""
    return density is None or compressor_class(config.algorithm).sends_all(density)


def kernels_select(config: DGCConfig) -> bool:
    """Return whether the kernels select entries in the compressor's place; only then it works on a GPU's memory."""
    row = compressor_class(config.algorithm)
    return is_unchanged(row) and row.is_plain_selection(config)


# A compressor that overrides only these names still encodes as its base class does.
_LABELS = ("name", "number", "source", "bits", "Options", "defaults", "_abc_impl")


def is_unchanged(row: type[Algorithm]) -> bool:
    """Return whether a class encodes like a compressor of this package. Then the kernels may select in its place.

    A user's class that derives from such a compressor may send something else. Then its own methods must be called.
    """
    for each in row.__mro__:
        if vars(each).get("number") in OWN_NUMBERS:
            return True
        if any(name not in _LABELS and (name == "__init__" or not name.startswith("__")) for name in vars(each)):
            return False
    return False
