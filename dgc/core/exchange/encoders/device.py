"""One bucket in one step where gradients, u, v and results are on a device.

What crosses is the message (or, for codecs that the device does not know and for dense sums, the entries and the dense
vector), once there and once back; the exchange between the two, on page-locked host memory, is that of the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from dgc.core.bucket_step import BucketStep
from dgc.core.kernels.device_dense import DenseTensor
from dgc.core.kernels.device_kernels import DeviceKernels
from dgc.core.kernels.device_messages import Format, device_format
from dgc.core.messages import Incoming, blaming
from dgc.core.plan import BucketPlan, Mode
from dgc.core.state import BucketState
from dgc.core.step import Outcome, StepContext, Submission, submitted


class DeviceBucketStep(BucketStep):
    """:class:`~dgc.core.bucket_step.BucketStep` with whole buckets handed to the device's kernels.

    Waits for the device once before the message leaves; a second time when a threshold was of no use, when the codecs
    are not the device's, and for clipping. Results are complete only when the kernels' stream has reached them.
    """

    begins_early = False

    _kernels: DeviceKernels
    _started: BucketPlan | None = None
    _packed = False

    def await_gradients(self, given: Sequence[Submission | None]) -> None:
        """Let the kernels' stream wait for this bucket's gradients, results and parameters."""
        for segment in self._bucket.segments:
            ready = submitted(given, segment).ready
            if ready is not None:
                self._kernels.runtime.wait_for(ready.handle)

    def overflows(self, context: StepContext, state: BucketState, given: Sequence[Submission | None]) -> bool:
        """See :meth:`BucketStep.overflows`. Waits, but only for parameters of a narrow type."""
        plan = self.plan(context.density)
        tensors = [t for t in self._dense_tensors(plan, context, given) if t.limit is not None]
        if plan.mode is not Mode.DENSE:
            sparse = [submitted(given, s) for s in self._bucket.sparse]
            tensors += [DenseTensor(result=i.result, limit=i.limit) for i in sparse if i.limit is not None]
        return self._kernels.exceeds(tensors, self._vector, state.u)

    def _start(self, plan: BucketPlan, context: StepContext) -> None:
        if self._started is not plan:
            # Buffers are about to be replaced, and the last step's copies from them may still be under way.
            self._kernels.wait()
            self._started = plan
        super()._start(plan, context)

    def _compress(
        self,
        plan: BucketPlan,
        context: StepContext,
        state: BucketState,
        given: Sequence[Submission | None],
        outcome: Outcome,
    ) -> tuple[int, bool]:
        self._packed = False
        form = self._format(plan)
        if form is None:
            return super()._compress(plan, context, state, given, outcome)
        self._start(plan, context)
        done = self._kernels.compress(
            self._work(plan, context, given),
            state.u,
            state.v,
            state.control,
            form,
            self._sender.payload,
            self._gradients(plan, context, given),
            self._vector[: plan.vector_size],
            masking=self._config.momentum_masking,
        )
        outcome.kept = done.kept
        self._packed = True
        if not self._config.error_feedback:
            self._memory.fill(state.v, 0)
        return done.count, done.nonfinite

    def _pack_dense(self, plan: BucketPlan, context: StepContext, given: Sequence[Submission | None]) -> bool:
        if plan.vector_size == 0:
            return False
        nonfinite = False
        if not self._packed:
            # In a dense sum of selected entries, the sparsified part is filled already.
            first = 0 if plan.mode is Mode.DENSE else self._bucket.sparse_size - plan.vector_start
            nonfinite = self._kernels.pack(self._gradients(plan, context, given, first), self._vector[first:])
        if plan.inline:
            self._sender.inline(self._vector)
        return nonfinite

    def _write_sparse(
        self,
        plan: BucketPlan,
        context: StepContext,
        given: Sequence[Submission | None],
        messages: list[Incoming],
        share: float,
    ) -> None:
        form = self._format(plan)
        if plan.mode is Mode.SUM:
            tensors = [
                DenseTensor(result=submitted(given, s).result, vector=s.offset, scale=context.loss_scale)
                for s in self._bucket.sparse
            ]
            self._kernels.write(tensors, self._vector)
        elif form is None:
            super()._write_sparse(plan, context, given, messages, share)
        else:
            n = self._bucket.sparse_size
            for message in messages:
                self._check(form, plan, message)
            self._kernels.receive(
                [submitted(given, s).result for s in self._bucket.sparse],
                self._bucket.sparse_offsets,
                n,
                form,
                [(message.payload, message.count) for message in messages],
                share * context.loss_scale,
            )

    def _write_dense(
        self,
        plan: BucketPlan,
        context: StepContext,
        state: BucketState,
        given: Sequence[Submission | None],
        refused: bool,
    ) -> None:
        self._kernels.write(self._dense_tensors(plan, context, given, refused), self._vector, state.u)

    def _check(self, form: Format, plan: BucketPlan, message: Incoming) -> None:
        """Refuse a damaged message before anything is applied."""
        with blaming(message.sender, self._bucket.index):
            form.check(message.payload, self._bucket.sparse_size, message.count, plan.codec.indices)

    @staticmethod
    def _format(plan: BucketPlan) -> Format | None:
        """The device's format of this plan's messages, if it writes them itself."""
        if plan.mode is not Mode.SPARSE or not plan.ks:
            return None
        return device_format(plan.codec.indices, plan.codec.values)

    def _gradients(
        self, plan: BucketPlan, context: StepContext, given: Sequence[Submission | None], first: int = 0
    ) -> list[DenseTensor]:
        """The dense tensors' way into the vector from its place ``first`` on."""
        scale, tensors = 1.0 / context.loss_scale, []
        for segment in self._dense_segments(plan):
            clip = 1.0 if context.clip is None else context.clip[segment.parameter]
            place = segment.offset - plan.vector_start - first
            tensors.append(DenseTensor(gradient=submitted(given, segment).gradient, vector=place, scale=scale * clip))
        return tensors

    def _dense_tensors(
        self, plan: BucketPlan, context: StepContext, given: Sequence[Submission | None], refused: bool = False
    ) -> list[DenseTensor]:
        """The dense tensors' way out of the vector; in a refused step without momentum and weight decay."""
        hyper, tensors = context.hyper, []
        for segment in self._dense_segments(plan):
            i, item = segment.parameter, submitted(given, segment)
            decay = 0.0 if refused else hyper.weight_decay[i]
            tensors.append(
                DenseTensor(
                    result=item.result,
                    parameter=item.parameter if decay else None,
                    u=segment.offset,
                    vector=segment.offset - plan.vector_start,
                    momentum=0.0 if refused else hyper.momentum[i],
                    nesterov=hyper.nesterov[i],
                    weight_decay=decay,
                    scale=context.loss_scale,
                    limit=item.limit,
                )
            )
        return tensors
