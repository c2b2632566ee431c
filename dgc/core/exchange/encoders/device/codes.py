"""Scales and codes of all elements, where gradients, v and results are on a device.

What crosses is the message: the device writes it into page-locked memory and reads those of all ranks from there. The
host chooses the scales of whole tensors, which the ranks may have to agree on, and checks what comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dgc.core.codecs import padded
from dgc.core.compressors.base import BucketSpec, StepInfo
from dgc.core.compressors.quantizers import Coded
from dgc.core.exchange.encoders.algorithm import AlgorithmEncoder
from dgc.core.exchange.encoders.base import BucketStep
from dgc.core.exchange.records import StepContext
from dgc.core.kernels.base import Array, Kernels
from dgc.core.kernels.gpu.backend import DeviceKernels
from dgc.core.kernels.gpu.codes import CodedTensor
from dgc.core.layout import Bucket, Layout
from dgc.core.message import Incoming
from dgc.core.plan import BucketPlan
from dgc.core.state import BucketState
from dgc.core.transport import Transport
from dgc.errors import WireError


class DeviceCodesEncoder(AlgorithmEncoder):
    """:class:`AlgorithmEncoder` for compressors whose messages are scales and codes: the same bytes and the same sums.

    It waits when scales are chosen on the host, for the message, and for what was found in the messages that came.
    """

    on_device = True
    _kernels: DeviceKernels
    _algorithm: Coded

    def __init__(
        self, bucket: Bucket, algorithm: Coded, kernels: Kernels, transport: Transport, layout: Layout
    ) -> None:
        """Lay out the message; arguments as for :class:`AlgorithmEncoder`."""
        super().__init__(bucket, algorithm, kernels, transport, layout)
        self._forms = [algorithm.form(t) for t in self._tensors]
        self._norm = next((form.norm for form in self._forms), "")
        self._moments: list[np.ndarray] | None = None
        self._parts, at = [], 0
        for tensor, form in zip(self._tensors, self._forms, strict=True):
            end = at + padded(form.bytes(tensor.n))
            codes = at + 4 * form.scales
            _, columns, inner = form.shape
            self._parts.append(
                CodedTensor(
                    length=tensor.n, kind=form.kind, bits=form.bits, levels=form.levels, group=form.group,
                    columns=columns, inner=inner, scales=at, codes=codes, bytes=end - codes, offset=tensor.offset,
                )
            )  # fmt: skip
            at = end
        self._size = at

    def await_gradients(self, step: StepContext) -> None:
        """Let the kernels' stream wait for this bucket's gradients, results and parameters."""
        for event in step.submissions.events(self._bucket.index):
            self._kernels.runtime.wait_for(event.handle)

    def apply(self, at: BucketStep, messages: Sequence[Incoming], share: float) -> None:  # noqa: D102
        for message in messages:
            try:
                self._check(message)
            except WireError as error:
                raise message.damaged(error) from error
        results = [item.result for item in at.step.submissions.of(self._bucket.sparse)]
        payloads = [message.payload for message in messages]
        factor = share * at.step.loss_scale
        damaged, at.flagged = self._kernels.add_codes(results, self._parts, payloads, factor)
        if damaged:
            self._find_damaged(messages, at.plan)

    # -- inside --------------------------------------------------------------------------------------------------

    def _prepare(self, state: BucketState, spec: BucketSpec) -> np.ndarray:
        self._moments = self._kernels.moments(state.v, self._parts)
        numbers = [self._algorithm.measured(t, m) for t, m in zip(self._tensors, self._moments, strict=True)]
        return np.array(numbers, np.float64)

    def _encode(self, state: BucketState, spec: BucketSpec, info: StepInfo) -> tuple[int, int]:
        moments, self._moments = self._moments, None
        if self._algorithm.measures and moments is None:
            moments = self._kernels.moments(state.v, self._parts)
        for i, (tensor, part) in enumerate(zip(self._tensors, self._parts, strict=True)):
            part.key = int(info.key(tensor.name))
            if moments is not None:
                scale, part.limit = self._algorithm.scale(tensor, i, moments[i], info)
                part.scale = float(scale)
        self._kernels.write_codes(state.v, self._parts, self._own[: self._size], self._norm)
        return sum(t.n for t in self._tensors), self._size

    def _subtract(self, plan: BucketPlan, state: BucketState) -> Array | None:
        places = [state.v[t.slice] for t in self._tensors]
        self._kernels.add_codes(places, self._parts, [self._own[: self._size]], -1.0, adds=True)
        return None

    def _check(self, message: Incoming) -> None:
        """Refuse what the device would not notice.

        Raises:
            WireError: the message is too short, counts other entries, or has a scale that is no finite number.
        """
        data = message.payload
        if data.size < self._size:
            raise WireError(f"the codes take {self._size} bytes, the message has {data.size}")
        if message.count != sum(t.n for t in self._tensors):
            raise WireError(f"a message with {message.count} entries came where every element is sent")
        for part, form in zip(self._parts, self._forms, strict=True):
            scales = data[part.scales : part.scales + 4 * form.scales].view(np.float32)
            if not (np.isfinite(scales) & ((scales >= 0) | (form.kind == "sign"))).all():
                raise WireError("a scale is no finite number >= 0; the message is damaged")

    def _find_damaged(self, messages: Sequence[Incoming], plan: BucketPlan) -> None:
        """Say which rank's codes are none that a sender writes.

        Raises:
            WireError: always; the host reads the messages again to find the one.
        """
        for message in messages:
            self._decode(message, self._spec(plan.density))
        raise WireError("a code is none that a sender writes, on the device alone; its memory may be at fault")
