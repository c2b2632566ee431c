"""How a bucket's tensors become the payload of a message, and messages become results.

:class:`TopKEncoder` sends the k largest accumulated entries of each tensor, what DGC does (Source: arXiv 1712.01887,
Algorithm 4); :class:`AlgorithmEncoder` lets any other compressor write the message. :class:`DenseVector` is what a
bucket sums densely: dense tensors in every step, and all tensors where a dense sum is cheaper. Everything around them
is :class:`~dgc.core.exchange.bucket.BucketExchange`'s: headers, collectives of messages, counters and errors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dgc.core.codecs import padded
from dgc.core.collectives import Transport
from dgc.core.compressors import OWN_NUMBERS, compressor_class
from dgc.core.compressors.base import Algorithm, BucketSpec, DenseValues, SparseValues, StepInfo, Tensor
from dgc.core.config import DGCConfig
from dgc.core.exchange.records import EntrySum, Hyper, StepContext
from dgc.core.kernels.base import Array, Kernels, MomentumRule, SegmentWork, Selection
from dgc.core.kernels.device import DeviceKernels
from dgc.core.layout import SMALL, Bucket, Layout, Segment
from dgc.core.message import BucketPlan, Incoming, Mode, Sender, make_plan, plan_for
from dgc.core.state import BucketState
from dgc.errors import ConfigError, LayoutError, WireError


def is_finite(values: np.ndarray) -> bool:
    """Whether all of (n,) values are; one read without temporaries where their squares add up to a finite number."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(values, values)) or np.isfinite(values).all())


class DenseVector:
    """The vector of one bucket, on the host, with its way in and its way out.

    Attributes:
        values: (plan.vector_size,) float32, float64 in float64 buckets.
        segments: those that are sent dense in this step.
    """

    segments: tuple[Segment, ...] = ()
    _plan: BucketPlan | None = None
    _first = 0
    """The vector's start in the bucket."""

    def __init__(self, bucket: Bucket, kernels: Kernels, own_share: float = 1.0, keeps_error: bool = True) -> None:
        """Allocate nothing yet: memory comes with the first plan that needs it.

        Args:
            bucket: the bucket.
            kernels: where its u is.
            own_share: what part of a summed gradient is a rank's own: 1 / P with op=Sum. The u of a sparsified tensor
                is this rank's own share, as it will be once entries are selected, also while the tensor is sent dense.
            keeps_error: whether what the codec of small tensors loses is sent later.
        """
        self._keeps_error = keeps_error
        self._bucket = bucket
        self._own_share = own_share
        self._kernels = kernels
        self.values = np.empty(0, bucket.dtype)
        self._places: list[np.ndarray] = []  # of the segments, in the vector
        self._left = np.zeros(bucket.small_size, np.float32)
        self._changes = False

    def start(self, plan: BucketPlan) -> None:
        """Begin a step; where its plan is another than before, have memory for it once nothing uses the old one."""
        self._changes = False
        if plan is self._plan:
            return
        self._wait()
        self._plan, self._first = plan, plan.vector_start
        if plan.vector_size and self.values.size != plan.vector_size:
            self.values = self._kernels.memory.host_array(plan.vector_size, self._bucket.dtype)
        self.segments = self._bucket.segments if plan.mode is Mode.DENSE else self._bucket.dense
        self._places = [self.values[s.offset - self._first :][: s.length] for s in self.segments]

    def _wait(self) -> None:
        """Wait until nothing works on the bucket's host buffers any more."""

    def begin(self, step: StepContext, plan: BucketPlan) -> None:
        """Let a device begin with :meth:`pack`."""

    def pack(self, step: StepContext, plan: BucketPlan) -> bool:
        """Copy the dense tensors' gradients into the vector; returns whether one is not finite."""
        if plan.vector_size == 0:
            return False
        vector = self.values
        # In a dense sum of selected entries, the sparsified part is filled already; padding must be 0 elsewhere.
        vector[0 if plan.mode is Mode.DENSE else self._bucket.sparse_size - self._first :] = 0
        for segment, place in zip(self.segments, self._places, strict=True):
            gradient, scale = step.submissions[segment.parameter].gradient, step.scales[segment.parameter]
            if scale == 1.0:
                place[...] = gradient
            else:
                np.multiply(gradient, vector.dtype.type(scale), out=place, dtype=vector.dtype)
        return not is_finite(vector)

    def code_small(self, plan: BucketPlan, state: BucketState, coded: np.ndarray) -> bool:
        """Add to small tensors' gradients their residuals, and code them by the plan; whether a sum is infinite.

        The state does not change before :meth:`commit`: a step that is refused or fails leaves it as it was.
        """
        if not (state.residual_pending or plan.small):
            return False
        self._changes = True
        first = self._bucket.sparse_size - self._first
        x = self.values[first : first + self._bucket.small_size]
        if state.residual_pending:
            x += state.error
        finite = is_finite(x)
        if plan.small and finite:
            plan.small.encode(x, coded, self._left)
        else:
            coded.fill(0)
        if not (plan.small and self._keeps_error):
            self._left.fill(0)
        return not finite

    def commit(self, plan: BucketPlan, state: BucketState) -> None:
        """The step counts: what its codec has lost becomes their residual."""
        if self._changes:
            state.error[...] = self._left
            state.residual_pending = plan.small is not None

    def add(self, plan: BucketPlan, messages: Sequence[Incoming]) -> None:
        """Become the sum of what came inside the messages; the rest stays."""
        if plan.small:
            small = self.values[: plan.plain_start]
            small.fill(0)
            for message in messages:
                try:
                    plan.small.add(message.coded, small)
                except WireError as error:
                    raise message.damaged(error) from error
        if plan.inline and plan.inline_bytes:
            plain = self.values[plan.plain_start :]
            plain.fill(0)
            for message in messages:
                plain += message.inline.view(plain.dtype)

    def average(self, share: float, plan: BucketPlan) -> bool:
        """Multiply the sum by 1 / P, or by 1; returns whether it is finite."""
        values = self.values
        if share != 1.0:
            values *= values.dtype.type(share)
        finite = is_finite(values)
        if plan.mode is Mode.DENSE and self._own_share != 1.0:
            values[: self._bucket.sparse_size] *= values.dtype.type(self._own_share)
        return finite

    def share_of(self, segment: Segment) -> float:
        """What part of a tensor's result its place in the vector holds."""
        return self._own_share if segment.offset < self._bucket.sparse_size else 1.0

    def write_sum(self, step: StepContext) -> None:
        """Write the results of sparsified tensors whose entries were summed densely."""
        for segment in self._bucket.sparse:
            np.multiply(self.values[segment.slice], step.loss_scale, out=step.submissions[segment.parameter].result)

    def write(self, step: StepContext, u: Array, *, refused: bool) -> None:
        """Write the results of dense tensors: momentum SGD on the mean; in a refused step the mean itself."""
        items = step.submissions.of(self.segments)
        if refused:
            for segment, place, item in zip(self.segments, self._places, items, strict=True):
                np.multiply(place, step.loss_scale / self.share_of(segment), out=item.result)
            return
        for first, stop in self._runs(step.hyper):
            segments, run = self.segments[first:stop], items[first:stop]
            if stop - first == 1:
                self._update(step, segments[0], run[0].parameter, run[0].result, u[segments[0].slice])
                continue
            # One update for neighbours with the same options: a call for each would cost more than its work.
            start = segments[0].offset
            whole = Segment(segments[0].parameter, start, segments[-1].slice.stop - start)
            results, parameters = np.empty(whole.length, self.values.dtype), None
            if step.hyper.weight_decay[whole.parameter]:
                parameters = np.zeros(whole.length, self.values.dtype)
                for segment, item in zip(segments, run, strict=True):
                    parameters[segment.offset - start :][: segment.length] = item.parameter
            self._update(step, whole, parameters, results, u[whole.slice])
            for segment, item in zip(segments, run, strict=True):
                item.result[...] = results[segment.offset - start :][: segment.length]

    def overflows(self, step: StepContext, u: Array) -> bool:
        """Whether a result will not fit the narrower type it is cast to (the same answer on every rank)."""
        dense = set(self.segments)
        for segment in self._bucket.segments:
            item = step.submissions[segment.parameter]
            if item.limit is None or segment.length == 0:
                continue
            result = item.result
            if segment in dense:
                result = np.empty_like(result)
                self._update(step, segment, item.parameter, result, u[segment.slice].copy())
            if not np.abs(result).max() <= item.limit:
                return True
        return False

    def _runs(self, hyper: Hyper) -> list[tuple[int, int]]:
        """Ranges of neighbours that are small and share their options; each larger one by itself."""
        starts: list[int] = []
        before = None
        for i, segment in enumerate(self.segments):
            p, options = segment.parameter, None
            if segment.length <= SMALL:
                sparsified = segment.offset < self._bucket.sparse_size
                options = hyper.momentum[p], hyper.nesterov[p], hyper.weight_decay[p], sparsified
            if options is None or options != before:
                starts.append(i)
            before = options
        return list(zip(starts, [*starts[1:], len(self.segments)], strict=False))

    def _update(
        self, step: StepContext, segment: Segment, parameter: np.ndarray | None, result: np.ndarray, u: np.ndarray
    ) -> None:
        hyper, i, share = step.hyper, segment.parameter, self.share_of(segment)
        mean = self.values[segment.offset - self._first :][: segment.length]
        rule = MomentumRule(
            hyper.momentum[i], hyper.nesterov[i], hyper.weight_decay[i] * share, step.loss_scale / share
        )
        self._kernels.dense_update(result, mean, u, parameter, rule)


class DeviceVector(DenseVector):
    """The vector of a bucket whose tensors are on a device: one pass in, one pass out."""

    _kernels: DeviceKernels
    _packing: tuple[StepContext, Callable[[], bool]] | None = None

    def _wait(self) -> None:
        self._kernels.wait()

    def begin(self, step: StepContext, plan: BucketPlan) -> None:  # noqa: D102
        self.start(plan)
        # In a dense sum of selected entries, the encoder fills the sparsified part.
        first = 0 if plan.mode is Mode.DENSE else self._bucket.sparse_size - self._first
        if plan.vector_size > first:
            parts = [
                SegmentWork(i.gradient, None, s.offset - self._first - first, s.length, scale=step.scales[s.parameter])
                for s, i in zip(self.segments, step.submissions.of(self.segments), strict=True)
            ]
            self._packing = step, self._kernels.begin_packing(parts, self.values[first:])

    def pack(self, step: StepContext, plan: BucketPlan) -> bool:  # noqa: D102
        if self._packing is None or self._packing[0] is not step:
            self.begin(step, plan)
        packing, self._packing = self._packing, None
        return packing is not None and packing[1]()

    def write_sum(self, step: StepContext) -> None:  # noqa: D102
        items = zip(self._bucket.sparse, step.submissions.of(self._bucket.sparse), strict=True)
        scale = step.loss_scale
        parts = [SegmentWork(offset=s.offset, length=s.length, scale=scale, result=i.result) for s, i in items]
        self._kernels.update(parts, self.values)

    def write(self, step: StepContext, u: Array, *, refused: bool) -> None:  # noqa: D102
        self._kernels.update(self._updates(step, refused=refused), self.values, u[self._first :])

    def overflows(self, step: StepContext, u: Array) -> bool:  # noqa: D102
        parts = [p for p in self._updates(step, refused=False) if p.limit is not None]
        written = []
        if self._plan is not None and self._plan.mode is not Mode.DENSE:
            items = zip(self._bucket.sparse, step.submissions.of(self._bucket.sparse), strict=True)
            written = [
                SegmentWork(offset=s.offset, length=s.length, result=i.result, limit=i.limit)
                for s, i in items
                if i.limit is not None
            ]
        return self._kernels.exceeds(parts, self.values, u[self._first :], written)

    def _updates(self, step: StepContext, *, refused: bool) -> list[SegmentWork]:
        """The dense tensors' way out of the vector; in a refused step without momentum and weight decay."""
        hyper, parts = step.hyper, []
        for s in self.segments:
            i, item, share = s.parameter, step.submissions[s.parameter], self.share_of(s)
            options = (0.0, False, 0.0)
            if not refused:
                options = (hyper.momentum[i], hyper.nesterov[i], hyper.weight_decay[i] * share)
            place = (s.offset - self._first, s.length, 0)
            scale = step.loss_scale / share
            parts.append(SegmentWork(None, item.parameter, *place, *options, scale, item.result, item.limit))
        return parts


@dataclass(slots=True)
class BucketStep:
    """One bucket in one step, from its gradients to the commit.

    Attributes:
        step: all gradients of the bucket are in.
        plan: how the bucket is sent; once compressed, with the sizes that this step's messages have on all ranks.
        state: u, v and thresholds, which change in place; before the commit u and v take in the gradients alone.
        sender: the message, whose payload an encoder writes.
        vector: what is summed densely; in a dense sum of entries an encoder writes its sparsified part.
        count: entries that this rank has put into its message.
        sent: positions and values of a selection as the receivers read them, (k,) each, until that is committed.
        flagged: whether a value is not finite; once the messages are in, on any rank.
        flagged_by: the ranks that met such a value before they sent anything.
        is_out: whether this rank's message is out; an error can no longer be reported in it.
        deferred: the results of the sparsified tensors that have not been written.
        absent: each rank's digest of the parameters of which it has no gradient, once the messages are in.
        kept: by segment, what the state held of those that are absent on this rank, before the step.
        begun: goes on with what :meth:`Encoder.begin` began; nothing may be left of it when the step ends.
    """

    step: StepContext
    plan: BucketPlan
    state: BucketState
    sender: Sender
    vector: DenseVector
    count: int = 0
    sent: tuple[Array, Array] | None = None
    flagged: bool = False
    flagged_by: list[int] = field(default_factory=list)
    is_out: bool = False
    deferred: EntrySum | None = None
    absent: list[int] = field(default_factory=list)
    kept: dict[Segment, list[Array]] = field(default_factory=dict)
    begun: Callable[[], Selection] | None = None

    def start_message(self) -> None:
        """Begin a message of the plan's sizes; in each step before anything of it or of the vector is written."""
        self.vector.start(self.plan)
        self.sender.start(self.plan, self.step.step, self.step.fingerprint)


class Encoder(ABC):
    """One bucket's way into a message and out of it. Used by the communication thread alone.

    Attributes:
        keeps_residual: whether what is not sent is sent later.
    """

    def __init__(
        self, bucket: Bucket, config: DGCConfig, kernels: Kernels, ranks: int, *, keeps_residual: bool
    ) -> None:
        self._bucket = bucket
        self._config = config
        self._kernels = kernels
        self._memory = kernels.memory
        self._ranks = ranks
        self._own_share, self._masking = config.own_share(ranks), config.masks
        self.keeps_residual = keeps_residual
        self._elements = sum(s.length for s in bucket.sparse)
        self._plans: dict[float | None, BucketPlan] = {}

    # -- sizes: the same on every rank -----------------------------------------------------------------------------

    def plan_at(self, density: float | None) -> BucketPlan:
        """How the bucket is sent at a density; None for a dense step."""
        if density not in self._plans:
            self._plans[density] = self._make_plan(density)
        return self._plans[density]

    @abstractmethod
    def _make_plan(self, density: float | None) -> BucketPlan: ...

    # -- a step ----------------------------------------------------------------------------------------------------

    def await_gradients(self, step: StepContext) -> None:
        """Let what comes next wait for the gradients of this bucket, where they are computed asynchronously."""
        for event in step.submissions.events.get(self._bucket.index, ()):
            self._kernels.wait_for(event.handle)

    def begin(self, at: BucketStep) -> None:
        """Let others (threads, a device) begin to compress while this thread has another bucket to do."""
        return

    @abstractmethod
    def compress(self, at: BucketStep) -> None:
        """Accumulate, select and encode: start the message, write its payload and nothing else of it."""

    def catch_up(self, at: BucketStep) -> None:
        """Make the collectives that the other ranks made before their message, where :meth:`compress` did not."""
        return

    @abstractmethod
    def apply(self, at: BucketStep, messages: Sequence[Incoming], share: float) -> None:
        """Write the results of the sparsified tensors: the messages' sum in rank order, times ``share``.

        Args:
            at: its plan's mode is SPARSE. Where the step ``defers``, entries may become ``at.deferred`` instead of
                being written; ``at`` is flagged where a message holds NaN or infinity, or the sum overflows.
            messages: of all ranks.
            share: 1 / P, or 1 for a sum.

        Raises:
            WireError: a message is damaged; names its sender.
        """

    def finish(self, at: BucketStep, *, refused: bool) -> None:
        """End the exchange of a sparsified step, whatever becomes of it."""
        return

    @abstractmethod
    def commit(self, at: BucketStep) -> None:
        """Subtract what was sent from v, and mask momentum."""

    # -- shared by encoders ----------------------------------------------------------------------------------------

    def _work(self, at: BucketStep) -> list[SegmentWork]:
        """What the kernels do with each sparsified tensor of the bucket in this step."""
        step, hyper = at.step, at.step.hyper
        work = []
        for segment, k in zip(self._bucket.sparse, at.plan.ks, strict=True):
            i = segment.parameter
            item = step.submissions[i]
            decay = hyper.weight_decay[i] * self._own_share
            work.append(
                SegmentWork(
                    gradient=item.gradient,
                    parameter=item.parameter if decay else None,
                    offset=segment.offset,
                    length=segment.length,
                    k=k,
                    momentum=hyper.momentum[i],
                    nesterov=hyper.nesterov[i],
                    weight_decay=decay,
                    scale=step.scales[i],
                )
            )
        return work

    def _put(self, at: BucketStep, entries: Sequence[tuple[Any, Any]], factor: float) -> None:
        """Add up the entries that came, and write or defer their sum."""
        total = EntrySum.of(self._bucket, entries, factor)
        at.flagged = not np.isfinite(total.values).all()
        if at.step.options.defers and not at.flagged and not (at.absent and all(at.absent)):
            at.deferred = total
        else:
            total.write(at.step, self._kernels)

    def _masks(self, sent: int) -> bool:
        """Whether momentum is cleared where so many entries were sent.

        That forgets stale momentum. Where all entries are sent none is stale: sparsity 0 is dense training.
        """
        return self._masking and sent < self._elements

    def _is_exact(self, density: float | None) -> bool:
        """Whether nothing is coded: in a dense step, and where sparsity is 0, which is one."""
        return density is None or compressor_class(self._config.algorithm).sends_all(density)

    def _small(self, density: float | None) -> str:
        """The value codec of small tensors."""
        return "float32" if self._is_exact(density) else self._config.small


class AlgorithmEncoder(Encoder):
    """Accumulates, then lets an algorithm write the message.

    Where the ranks share something before encoding, an allreduce of it comes before the message.
    """

    def __init__(
        self, bucket: Bucket, algorithm: Algorithm, kernels: Kernels, transport: Transport, layout: Layout
    ) -> None:
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
            info.shared = self._share(step, algorithm.prepare(state.v, spec))
        at.start_message()
        if plan.mode is Mode.SPARSE:
            self._own = at.sender.payload
        elif self._own.size != padded(algorithm.max_bytes(spec)):
            self._own = self._memory.host_array(padded(algorithm.max_bytes(spec)), np.uint8)
        at.count, used = algorithm.encode(state.v, self._own, spec, info)
        self._own[used:] = 0
        self._count_sent = at.count
        if plan.mode is Mode.SUM:
            self._fill_vector(at.vector.values, spec)

    def catch_up(self, at: BucketStep) -> None:  # noqa: D102
        if at.plan.is_active and self._algorithm.shares and self._shared_in is not at.step:
            self._share(at.step, np.zeros(len(self._tensors)))

    def apply(self, at: BucketStep, messages: Sequence[Incoming], share: float) -> None:  # noqa: D102
        spec, factor = self._spec(at.plan.density), share * at.step.loss_scale
        decoded: list[Any] = [self._decode(message, spec) for message in messages]
        if isinstance(decoded[0], SparseValues):
            self._put(at, [(each.positions, each.values) for each in decoded], factor)
            return
        results = [item.result for item in at.step.submissions.of(self._bucket.sparse)]
        for result in results:
            result.fill(0)
        for each in decoded:
            for result, values in zip(results, each.values, strict=True):
                result += values * result.dtype.type(factor)
        at.flagged = not all(is_finite(result) for result in results)

    def finish(self, at: BucketStep, *, refused: bool) -> None:  # noqa: D102
        self._algorithm.finish(self._spec(at.plan.density), at.state.thresholds, refused=refused)

    def commit(self, at: BucketStep) -> None:  # noqa: D102
        if self.keeps_residual:
            self._subtract(at.plan, at.state)

    # -- inside --------------------------------------------------------------------------------------------------

    def _accumulate(self, at: BucketStep, info: StepInfo) -> bool:
        """Add the gradients to u and v; returns whether one is not finite."""
        state, work = at.state, self._work(at)
        if not self._algorithm.needs_increment:
            return self._kernels.accumulate(work, state.u, state.v)
        info.increment = np.zeros_like(state.v)
        nonfinite = self._kernels.accumulate(work, state.u, info.increment)
        state.v += info.increment
        if is_finite(state.v):
            return nonfinite
        state.v[~np.isfinite(state.v)] = 0
        return True

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

    def _subtract(self, plan: BucketPlan, state: BucketState) -> None:
        """Subtract this rank's own message from v, and clear u where entries were sent, with masking."""
        spec = self._spec(plan.density)
        decoded = self._algorithm.decode(self._own, self._count_sent, spec)
        if isinstance(decoded, SparseValues):
            late = not self._algorithm.has_room_for_all(spec)
            masking = late and self._masks(len(decoded.positions))
            self._kernels.take_out(state.u, state.v, decoded.positions, decoded.values, masking=masking)
            return
        for tensor, values in zip(self._tensors, decoded.values, strict=True):
            state.v[tensor.slice] -= values

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


class TopKEncoder(Encoder):
    """Momentum correction and selection in one pass; masking at the selected places once the step counts."""

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
            at.begun = self._kernels.begin_selection(self._work(at), at.state.u, at.state.v, at.state.thresholds)

    def compress(self, at: BucketStep) -> None:  # noqa: D102
        plan, state = at.plan, at.state
        at.start_message()
        if not plan.is_active:
            return
        begun = at.begun or self._kernels.begin_selection(self._work(at), state.u, state.v, state.thresholds)
        at.begun = None
        selection = begun()
        positions, values = selection.positions, selection.values
        if plan.mode is Mode.SPARSE:
            values = plan.codec.encode(positions, values, at.sender.payload)
        else:
            at.vector.values[: self._bucket.sparse_size] = 0
            at.vector.values[positions] = values
        at.sent, at.count, at.flagged = (positions, values), len(positions), selection.nonfinite

    def apply(self, at: BucketStep, messages: Sequence[Incoming], share: float) -> None:  # noqa: D102
        entries = []
        for message in messages:
            try:
                entries.append(at.plan.codec.decode(message.payload, message.count))
            except (WireError, LayoutError) as error:
                raise message.damaged(error) from error
        self._put(at, entries, share * at.step.loss_scale)

    def commit(self, at: BucketStep) -> None:  # noqa: D102
        assert at.sent is not None, "the bucket has run"
        positions, values = at.sent
        masking = self._masks(sum(at.plan.ks))
        self._kernels.take_out(at.state.u, at.state.v, positions, values, masking=masking)


_LABELS = ("name", "number", "source", "bits", "Options", "defaults", "_abc_impl")
"""What a compressor may have of its own and still encode as the one that it derives from."""


def make_encoders(
    layout: Layout, config: DGCConfig, kernels: Kernels, transport: Transport
) -> list[tuple[Encoder, DenseVector]]:
    """The encoder and the dense vector of each bucket of the layout."""
    vector = DeviceVector if kernels.on_device else DenseVector
    algorithm = None if runs_on_devices(config) else compressor_class(config.algorithm)(config)
    made = []
    for bucket in layout.buckets:
        encoder: Encoder = (
            TopKEncoder(bucket, config, kernels, transport.size, keeps_residual=config.error_feedback)
            if algorithm is None
            else AlgorithmEncoder(bucket, algorithm, kernels, transport, layout)
        )
        for sparsity in config.sparsity:
            encoder.plan_at(1.0 - sparsity)
        made.append((encoder, vector(bucket, kernels, config.own_share(transport.size), config.error_feedback)))
    return made


def runs_on_devices(config: DGCConfig) -> bool:
    """Whether the compressor works on a GPU's own memory; others get copies in host memory."""
    row = compressor_class(config.algorithm)
    return is_unchanged(row) and row.is_plain_selection(config)


def is_unchanged(row: type[Algorithm]) -> bool:
    """Whether a compressor encodes as one of this package does, which the kernels' selection stands in for.

    A user's class may derive from one of ours and change what is sent: then its own methods have to be called.
    """
    for each in row.__mro__:
        if vars(each).get("number") in OWN_NUMBERS:
            return True
        if any(name not in _LABELS and (name == "__init__" or not name.startswith("__")) for name in vars(each)):
            return False
    return False
