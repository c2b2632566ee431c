"""Metrics of a residual, tensor by tensor: its norm, and the share that a step sent.

A :class:`Probe` measures the steps of one exchange. It only reads: training has the same bits with and without it.

Letters: n elements of a bucket's sparsified part, k entries that a step sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeAlias

import numpy as np

from dgc.core.kernels.base import HostMemory
from dgc.core.layout import Bucket, Layout, Segment

Sent: TypeAlias = tuple[np.ndarray | None, np.ndarray, np.ndarray]
"""On the host: (k,) ascending positions in the bucket that were sent, None for all; and (n,) the residual with this
step's gradient before and after that."""


class Source(Protocol):
    """A bucket that can be probed."""

    bucket: Bucket

    def probe(self) -> Sent | str:
        """What leaves the residual in a finished step, or why nothing stays in it."""
        ...


class Sink(Protocol):
    """Chooses the steps that are probed, and takes their metrics. None of these raises.

    Attributes:
        is_off: whether no more steps are to be probed.
    """

    is_off: bool

    def wants(self, step: int) -> bool:
        """Whether to probe a step."""
        ...

    def take(self, probe: Probe) -> None:
        """A step was probed."""
        ...

    def fail(self, error: Exception) -> None:
        """It cannot be probed."""
        ...

    def remind(self) -> None:
        """It is off, and another step is over."""
        ...


@dataclass(slots=True)
class TensorFigures:
    """One tensor in one step, on one rank; or several together. A figure of nothing is None.

    Attributes:
        elements: n.
        sent: k.
        squares_before: sum of squares of the residual with this step's gradient (velocity), before anything was sent.
        squares_after: that of what stayed.
    """

    elements: int = 0
    sent: int = 0
    squares_before: float = 0.0
    squares_after: float = 0.0

    @property
    def residual_norm(self) -> float:
        """L2 norm of what has not been sent."""
        return float(np.sqrt(self.squares_after))

    @property
    def sent_share(self) -> float | None:
        """Share of the squared norm of what could be sent that was sent: 1 for all of it."""
        return 1.0 - self.squares_after / self.squares_before if self.squares_before > 0 else None

    @property
    def density(self) -> float:
        """Share of the entries that was sent."""
        return self.sent / self.elements if self.elements else 0.0

    def as_dict(self) -> dict[str, float]:
        """The figures by name, those of nothing left out."""
        found = {name: getattr(self, name) for name in FIGURES}
        return {name: float(value) for name, value in found.items() if value is not None}

    @classmethod
    def together(cls, figures: Iterable[TensorFigures]) -> TensorFigures:
        """Several tensors as one."""
        parts = list(figures)
        return cls(*(sum(getattr(part, each.name) for part in parts) for each in fields(cls)))


FIGURES = ("residual_norm", "sent_share", "density")
"""What is shown of a tensor."""


class Probe:
    """Measures the steps of one exchange.

    Attributes:
        step: number of the latest step that was probed; None before the first.
        figures: of that step, by name: the tensors that keep something back.
        left_out: of that step, by name: why there is nothing to see of the others.
    """

    def __init__(self, layout: Layout, sink: Sink) -> None:
        """Probe no step yet of the exchange with this layout."""
        self.step: int | None = None
        self.figures: dict[str, TensorFigures] = {}
        self.left_out: dict[str, str] = {}
        self._layout = layout
        self._sink = sink

    def measure(self, step: Any, buckets: Sequence[Source]) -> None:
        """Probe a finished step, numbered ``step.step``, before what was sent leaves the residual; never raises."""
        if self._sink.is_off:
            self._sink.remind()
            return
        try:
            if not self._sink.wants(step.step):
                return
            figures: dict[str, TensorFigures] = {}
            left_out: dict[str, str] = {}
            for each in buckets:
                left_out |= self._named(each.bucket.dense, "sent dense: all of it is sent in every step")
                if not each.bucket.sparse:
                    continue
                sent = each.probe()
                if isinstance(sent, str):
                    left_out |= self._named(each.bucket.sparse, sent)
                else:
                    figures |= {self._name(s): _figures(s, sent) for s in each.bucket.sparse}
            # As a whole: another thread may be reading.
            self.step, self.figures, self.left_out = step.step, figures, left_out
        except Exception as error:
            self._sink.fail(error)
            return
        self._sink.take(self)

    def _named(self, segments: Sequence[Segment], reason: str) -> dict[str, str]:
        return {self._name(segment): reason for segment in segments}

    def _name(self, segment: Segment) -> str:
        return self._layout.parameters[segment.parameter].name


def _figures(segment: Segment, sent: Sent) -> TensorFigures:
    positions, *residuals = sent
    count = segment.length
    if positions is not None:
        first, stop = np.searchsorted(positions, [segment.offset, segment.slice.stop])
        count = int(stop - first)
    return TensorFigures(segment.length, count, *(HostMemory().sum_of_squares(r[segment.slice]) for r in residuals))
