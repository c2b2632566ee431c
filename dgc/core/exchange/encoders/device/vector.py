"""What is summed densely of a bucket whose tensors are on a device."""

from __future__ import annotations

from collections.abc import Callable

from dgc.core.exchange.encoders.dense_vector import DenseVector
from dgc.core.exchange.records import StepContext
from dgc.core.kernels.gpu.backend import DeviceKernels
from dgc.core.kernels.gpu.tables import DenseTensor
from dgc.core.layout import Bucket
from dgc.core.plan import BucketPlan, Mode


class DeviceVector(DenseVector):
    """The dense vector of a bucket whose tensors are on a device: one launch in, one launch out."""

    _kernels: DeviceKernels

    def __init__(
        self, bucket: Bucket, kernels: DeviceKernels, own_share: float = 1.0, keeps_error: bool = True
    ) -> None:
        """Allocate nothing yet; arguments as for :class:`DenseVector`."""
        super().__init__(bucket, kernels, own_share, keeps_error)
        self.is_packed = False
        """Whether the encoder has packed the dense tensors of this step; it can do so on its way."""

    def start(self, plan: BucketPlan) -> None:  # noqa: D102
        super().start(plan)
        self.is_packed = False

    def _wait(self) -> None:
        self._kernels.wait()

    def pack(self, step: StepContext, plan: BucketPlan) -> bool:  # noqa: D102
        if plan.vector_size == 0 or self.is_packed:
            return False
        # In a dense sum of selected entries, the sparsified part is filled already.
        first = 0 if plan.mode is Mode.DENSE else self._bucket.sparse_size - self._first
        return self._kernels.pack(self.gradients(step, plan, first), self.values[first:])

    def write_sum(self, step: StepContext) -> None:  # noqa: D102
        tensors = [
            DenseTensor(result=step.submissions[s.parameter].result, vector=s.offset, scale=step.loss_scale)
            for s in self._bucket.sparse
        ]
        self._kernels.write(tensors, self.values)

    def write(self, step: StepContext, u: object, *, refused: bool) -> None:  # noqa: D102
        self._kernels.write(self._updates(step, refused), self.values, u)

    def overflows(self, step: StepContext, u: object) -> Callable[[], bool]:
        """See :meth:`DenseVector.overflows`. The answer waits, but only for parameters of a narrow type."""
        tensors = [t for t in self._updates(step) if t.limit is not None]
        if self._plan is not None and self._plan.mode is not Mode.DENSE:
            sparse = step.submissions.of(self._bucket.sparse)
            tensors += [DenseTensor(result=i.result, limit=i.limit) for i in sparse if i.limit is not None]
        return self._kernels.exceeds(tensors, self.values, u)

    def gradients(self, step: StepContext, plan: BucketPlan, first: int = 0) -> list[DenseTensor]:
        """The dense tensors' way into the vector from its place ``first`` on."""
        return [
            DenseTensor(
                gradient=step.submissions[s.parameter].gradient,
                vector=s.offset - self._first - first,
                scale=step.scales[s.parameter],
            )
            for s in self.segments
        ]

    def _updates(self, step: StepContext, refused: bool = False) -> list[DenseTensor]:
        """The dense tensors' way out of the vector; in a refused step without momentum and weight decay."""
        hyper, tensors = step.hyper, []
        for segment in self.segments:
            i, item, share = segment.parameter, step.submissions[segment.parameter], self.share_of(segment)
            decay = 0.0 if refused else hyper.weight_decay[i] * share
            tensors.append(
                DenseTensor(
                    result=item.result,
                    parameter=item.parameter if decay else None,
                    u=segment.offset,
                    vector=segment.offset - self._first,
                    momentum=0.0 if refused else hyper.momentum[i],
                    nesterov=hyper.nesterov[i],
                    weight_decay=decay,
                    scale=step.loss_scale / share,
                    limit=item.limit,
                )
            )
        return tensors
