"""The k largest entries where gradients, u, v and results are on a device.

What crosses is the selected entries, as positions and values, once there and once back; the host codes them, and the
exchange between the two is that of the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from dgc.core.config import DGCConfig
from dgc.core.exchange.encoders.base import BucketStep
from dgc.core.exchange.encoders.device.vector import DeviceVector
from dgc.core.exchange.encoders.topk import TopKEncoder
from dgc.core.exchange.records import StepContext
from dgc.core.kernels.gpu.backend import DeviceKernels
from dgc.core.kernels.gpu.buckets import Begun
from dgc.core.layout import Bucket
from dgc.core.message import Incoming


class DeviceEncoder(TopKEncoder):
    """:class:`TopKEncoder` with whole buckets handed to the device's kernels.

    All buckets whose gradients are in are enqueued before the first message is waited for, and that wait is for all of
    them. A second one is needed when a threshold was of no use, and for clipping.
    Results are complete only when the kernels' stream has reached them.
    """

    _kernels: DeviceKernels

    def __init__(
        self, bucket: Bucket, config: DGCConfig, kernels: DeviceKernels, ranks: int, vector: DeviceVector
    ) -> None:
        """Allocate nothing; ``vector`` is the bucket's."""
        super().__init__(bucket, config, kernels, ranks)
        self._vector = vector
        self._scratch = kernels.new_scratch()
        self._enqueued: Begun | None = None

    def await_gradients(self, step: StepContext) -> None:
        """Let the kernels' stream wait for this bucket's gradients, results and parameters."""
        for event in step.submissions.events(self._bucket.index):
            self._kernels.runtime.wait_for(event.handle)

    def begin(self, at: BucketStep) -> None:  # noqa: D102
        plan, state = at.plan, at.state
        at.start_message()
        self._enqueued = self._kernels.begin(
            self._work(at) if plan.is_active else [],
            state.u,
            state.v,
            state.thresholds,
            self._vector.gradients(at.step, plan),
            self._vector.values[: plan.vector_size],
            scratch=self._scratch,
        )

    def abandon(self) -> None:  # noqa: D102
        enqueued, self._enqueued = self._enqueued, None
        if enqueued is not None:
            enqueued.finish()

    def catch_up(self, at: BucketStep) -> None:
        """See :class:`Encoder`; the message must not be written any more."""
        self.abandon()

    def compress(self, at: BucketStep) -> None:  # noqa: D102
        if self._enqueued is None:
            self.begin(at)
        enqueued, self._enqueued = self._enqueued, None
        assert enqueued is not None
        selection = enqueued.finish()
        self._vector.is_packed = True
        if at.plan.is_active:
            self._write(at, selection.positions, selection.values)
        at.flagged = selection.nonfinite

    def apply(self, at: BucketStep, messages: Sequence[Incoming], share: float) -> None:  # noqa: D102
        # A damaged message is refused before anything is applied.
        entries = self._read(at, messages)
        self._kernels.receive(
            [item.result for item in at.step.submissions.of(self._bucket.sparse)],
            self._bucket.sparse_offsets,
            entries,
            share * at.step.loss_scale,
        )
        # What other ranks send is finite, and the host does not wait for the device to look at the sum.
