"""What a residual holds back, tensor by tensor: its norm, the share that a step sent, and how long entries wait.

An :class:`Inside` looks into the steps of one exchange. It only reads: training has the same bits with and without it.

Letters: n elements of a bucket's sparsified part, k entries that a step sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from dgc.core.kernels.base import Memory
from dgc.core.state.layout import Bucket, Layout, Segment


@dataclass(frozen=True, slots=True)
class Sent:
    """What left a bucket's residual in one step.

    Attributes:
        positions: (k,) int64 within the bucket, ascending; None for all of them.
        before: (k,) v there before that, (n,) for all of them.
        v: (n,) the residual after it.
        source: what v is in the state: another object once the state was emptied.
    """

    positions: np.ndarray | None
    before: np.ndarray
    v: np.ndarray
    source: object = None

    def on_host(self, memory: Memory, look: bool) -> Sent:
        """The same in host memory; values only where they will be looked at."""
        positions = None if self.positions is None else _on_host(self.positions, memory).astype(np.int64)
        before, v = (_on_host(a, memory) if look else np.empty(0) for a in (self.before, self.v))
        return Sent(positions, before, v, source=self.v)


def _on_host(array: Any, memory: Memory) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else memory.to_host(array)


class Source(Protocol):
    """What a step of one bucket is asked; see :meth:`dgc.core.exchange.bucket.BucketExchange.what_was_sent`."""

    bucket: Bucket

    def what_was_sent(self, step: Any, look: bool) -> Sent | str:
        """What left the residual, or why there is nothing to see."""
        ...


class Sink(Protocol):
    """Who decides which steps are looked at, and gets what was seen. None of these raises.

    Attributes:
        is_off: whether nobody wants to see any more.
    """

    is_off: bool

    def looks(self, step: int) -> bool:
        """Whether to look at a step."""
        ...

    def take(self, inside: Inside) -> None:
        """A step was looked at."""
        ...

    def fail(self, error: Exception) -> None:
        """It cannot be looked at."""
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
        waited: steps that the sent entries had waited, added up.
        waited_max: the longest of these.
        waiting: entries that stayed and are not 0.
        ages: steps that those have waited, added up.
        waiting_max: the longest of these.
    """

    elements: int = 0
    sent: int = 0
    squares_before: float = 0.0
    squares_after: float = 0.0
    waited: int = 0
    waited_max: int | None = None
    waiting: int = 0
    ages: int = 0
    waiting_max: int | None = None

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

    @property
    def waited_mean(self) -> float | None:
        """Steps that a sent entry had waited: 0 for one that was sent in the step before as well."""
        return self.waited / self.sent if self.sent else None

    @property
    def waiting_mean(self) -> float | None:
        """Steps for which an entry that was not sent has waited, this one included."""
        return self.ages / self.waiting if self.waiting else None

    def as_dict(self) -> dict[str, float]:
        """The figures by name, those of nothing left out."""
        found = {name: getattr(self, name) for name in FIGURES}
        return {name: float(value) for name, value in found.items() if value is not None}

    def add(self, other: TensorFigures) -> None:
        """Take in another tensor."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if each.name.endswith("_max"):
                setattr(self, each.name, max((a for a in (mine, theirs) if a is not None), default=None))
            else:
                setattr(self, each.name, mine + theirs)

    @classmethod
    def together(cls, figures: Iterable[TensorFigures]) -> TensorFigures:
        """Several tensors as one."""
        whole = cls()
        for each in figures:
            whole.add(each)
        return whole


FIGURES = ("residual_norm", "sent_share", "density", "waited_mean", "waited_max", "waiting_mean", "waiting_max")
"""What is shown of a tensor."""


class Ages:
    """When each entry of a bucket was sent last, in steps that select; the clock stands still in others."""

    def __init__(self, n: int) -> None:
        """Count from now on: 4 bytes an entry."""
        self.clock = 0
        self.last = np.zeros(n, np.int32)
        self._step: int | None = None
        self._source: object = None
        self._is_fresh = True
        self._before: tuple[np.ndarray, np.ndarray] | None = None

    def begin_anew(self) -> None:
        """Nothing waits: what was in the residual is gone, or another's."""
        self._is_fresh = True
        self._before = None

    def passed(self, step: int) -> None:
        """A step in which nothing was held back."""
        self.begin_anew()
        self._step = step

    def note(self, step: int, positions: np.ndarray, source: object, returned: bool) -> np.ndarray:
        """A step that selected.

        Args:
            step: its number.
            positions: (k,) that were sent.
            source: identifies the residual; another one is empty.
            returned: whether what the step before sent has come back.

        Returns:
            (k,) steps that each of them had waited.
        """
        again = step == self._step
        if source is not self._source or (self._step is not None and step != self._step + 1 and not again):
            self.begin_anew()
        if (again or returned) and self._before is not None:
            self.last[self._before[0]] = self._before[1]
            self.clock -= again
            if again:
                np.minimum(self.last, self.clock, out=self.last)
        if self._is_fresh:
            self.last.fill(self.clock)
        self._is_fresh, self._step, self._source = False, step, source
        self.clock += 1
        before: np.ndarray = self.last[positions]
        self._before = positions, before
        self.last[positions] = self.clock
        return self.clock - 1 - before


class Inside:
    """Looks into the steps of one exchange.

    Attributes:
        step: the latest one that was looked at; None if none was.
        figures: of that step, by name: the tensors that hold something back.
        left_out: of that step, by name: why there is nothing to see of the others.
    """

    def __init__(self, layout: Layout, sink: Sink) -> None:
        """Begin to count how long entries wait.

        Args:
            layout: of the exchange.
            sink: is asked and told.
        """
        self.step: int | None = None
        self.figures: dict[str, TensorFigures] = {}
        self.left_out: dict[str, str] = {}
        self._layout = layout
        self._sink = sink
        self._returned = 0
        self._ages: dict[int, Ages] = {}
        self._seen: dict[str, TensorFigures] = {}
        self._unseen: dict[str, str] = {}

    def begin_anew(self) -> None:
        """A state was loaded: what waits in it has waited for a time that is not known."""
        for ages in self._ages.values():
            ages.begin_anew()

    def concluded(self, step: Any, buckets: Sequence[Source], returned: int) -> None:
        """A step is over and counts; never raises.

        Args:
            step: it; has a number, ``step``.
            buckets: of the exchange.
            returned: how often what a step had sent has come back because nobody applied it.
        """
        if self._sink.is_off:
            self._ages = {}
            self._sink.remind()
            return
        try:
            look = self._sink.looks(step.step)
            self._seen, self._unseen = {}, {}
            for each in buckets:
                self._note(each, step, look, returned != self._returned)
            self._returned = returned
            if look:
                # As a whole: another thread may be reading.
                self.step, self.figures, self.left_out = step.step, self._seen, self._unseen
        except Exception as error:
            self._sink.fail(error)
            return
        if look:
            self._sink.take(self)

    def _note(self, source: Source, step: Any, look: bool, returned: bool) -> None:
        bucket = source.bucket
        if look:
            self._leave_out(bucket.dense, "travels dense: all of it is sent in every step")
        if not bucket.sparse:
            return
        sent = source.what_was_sent(step, look)
        if bucket.index not in self._ages:
            self._ages[bucket.index] = Ages(0 if isinstance(sent, str) else bucket.sparse_size)
        ages = self._ages[bucket.index]
        if isinstance(sent, str):
            ages.passed(step.step)
            if look:
                self._leave_out(bucket.sparse, sent)
            return
        if ages.last.size != bucket.sparse_size:
            ages = self._ages[bucket.index] = Ages(bucket.sparse_size)
        waited = None
        if sent.positions is None:
            ages.passed(step.step)
        else:
            waited = ages.note(step.step, sent.positions, sent.source, returned)
        if look:
            self._look(bucket, sent, ages, waited)

    def _leave_out(self, segments: Sequence[Segment], reason: str) -> None:
        self._unseen.update({self._name(segment): reason for segment in segments})

    def _name(self, segment: Segment) -> str:
        return self._layout.parameters[segment.parameter].name

    def _look(self, bucket: Bucket, sent: Sent, ages: Ages, waited: np.ndarray | None) -> None:
        from dgc.core.state import inside_loops as loops  # which loads Numba

        for place, segment in enumerate(bucket.sparse):
            found = TensorFigures(segment.length)
            v = sent.v[segment.slice]
            self._seen[self._name(segment)] = found
            if waited is None or sent.positions is None:
                found.sent, found.waited_max = segment.length, 0
                found.squares_after = _squares(v)
                found.squares_before = _squares(sent.before[segment.slice])
                continue
            own = slice(*np.searchsorted(sent.positions, bucket.sparse_offsets[place : place + 2]))
            found.sent = own.stop - own.start
            if found.sent:
                found.waited, found.waited_max = int(waited[own].sum()), int(waited[own].max())
            last = ages.last[segment.slice]
            found.squares_after, found.waiting, found.ages, longest = loops.look(v, last, ages.clock)
            found.waiting_max = longest if found.waiting else None
            left = _squares(sent.v[sent.positions[own]])
            found.squares_before = max(0.0, found.squares_after - left) + _squares(sent.before[own])


def _squares(values: np.ndarray) -> float:
    return float(np.einsum("i,i->", values, values, dtype=np.float64))
