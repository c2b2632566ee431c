"""What residuals hold back, as users see it: a mapping of the last step that was looked at, and a log of such steps.

Every figure is one rank's own. Nothing here asks the other ranks, so any of them may log, or rank 0 alone.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dgc.core.exchange.exchange import Exchange
from dgc.core.probe import FIGURES, Probe, TensorFigures
from dgc.errors import ConfigError

OFF = "no log is on: call log_to(writer) first, on each rank that wants to see"
ALONE = "nothing is compressed in this process, which has no other ranks"
UNBOUND = "the compressor is bound to no model yet"
NOT_YET = "no step was looked at yet"


class Nowhere:
    """A writer that writes nothing, for those who only read ``compression.inside``."""

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Do nothing."""


NOWHERE = Nowhere()


class Metrics(Mapping[str, TensorFigures]):
    """The latest step that was looked at: a tensor's name -> its figures on this rank.

    Attributes:
        step: its number; None without one.
        total: all these tensors together.
        left_out: the other tensors' names -> why there is nothing to see of them.
        nothing: why there is no tensor; None if there is one.
    """

    def __init__(
        self,
        step: int | None = None,
        figures: Mapping[str, TensorFigures] | None = None,
        left_out: Mapping[str, str] | None = None,
        nothing: str = NOT_YET,
    ) -> None:
        """Take what was seen; ``nothing`` is said where nothing was looked at."""
        self.step = step
        self.left_out = dict(left_out or {})
        self._figures = dict(figures or {})
        self.total = TensorFigures.together(self._figures.values())
        reasons = dict.fromkeys(self.left_out.values())
        said = "; ".join(reasons) if reasons else nothing
        self.nothing: str | None = None if self._figures else said

    @classmethod
    def into(cls, probes: Iterable[Probe], nothing: str = NOT_YET) -> Metrics:
        """What several exchanges of one model have seen, together."""
        seen = [probe for probe in probes if probe.step is not None]
        figures = {name: f for probe in seen for name, f in probe.figures.items()}
        left_out = {name: why for probe in seen for name, why in probe.left_out.items()}
        return cls(max((i.step for i in seen if i.step is not None), default=None), figures, left_out, nothing)

    def __getitem__(self, name: str) -> TensorFigures:
        """A tensor's figures.

        Raises:
            KeyError: says why there are none.
        """
        if name not in self._figures:
            raise KeyError(f"{name}: {self.left_out.get(name) or self.nothing or 'there is no such tensor'}")
        return self._figures[name]

    def __contains__(self, name: object) -> bool:
        """Whether there is anything to see of a tensor."""
        return name in self._figures

    def __iter__(self) -> Iterator[str]:
        """The tensors' names."""
        return iter(self._figures)

    def __len__(self) -> int:
        """How many tensors there are."""
        return len(self._figures)

    def __str__(self) -> str:
        """A table."""
        if self.nothing is not None:
            return self.nothing
        rows = [("total", self.total), *self._figures.items()]
        width = max(len(name) for name, _ in rows)
        lines = [f"step {self.step}".ljust(width) + "".join(f"{name:>15}" for name in FIGURES)]
        for name, figures in rows:
            shown = figures.as_dict()
            lines.append(name.ljust(width) + "".join(f"{shown.get(f, float('nan')):15.4g}" for f in FIGURES))
        return "\n".join(lines)

    __repr__ = __str__


class Log:
    """Where the figures of every so many steps go, until a writer fails.

    Attributes:
        is_off: whether writing has failed.
        writes_total: whether one exchange has all tensors of the model, so that their total can be written, too.
    """

    is_off = False
    writes_total = True

    def __init__(self, writer: Any, every: int, prefix: str, *, waits: bool) -> None:
        """Check the arguments.

        Args:
            writer: has ``add_scalar(tag, value, step)``.
            every: the number of a step that is looked at is a multiple of this.
            prefix: of every tag.
            waits: whether :meth:`tell` will be called where a warning may be raised; otherwise it is shown at once.

        Raises:
            ConfigError: one is something else.
        """
        if not callable(getattr(writer, "add_scalar", None)):
            raise ConfigError(
                f"log_to() got {writer!r}, which has no add_scalar(tag, value, step); give it a SummaryWriter of "
                "torch.utils.tensorboard, in TensorFlow also one of tf.summary.create_file_writer, or None to turn "
                "the log off"
            )
        number = operator.index(every) if hasattr(every, "__index__") else 0
        if isinstance(every, bool) or number < 1:
            raise ConfigError(f"every is {every!r}; allowed: a number of steps >= 1")
        self._writer = writer
        self._every = number
        self._prefix = str(prefix)
        self._waits = waits
        self._untold: str | None = None

    def wants(self, step: int) -> bool:
        """Whether to look at a step."""
        return step % self._every == 0

    def take(self, probe: Probe) -> None:
        """Write what was seen; a writer's error ends the log, and nothing else."""
        try:
            step = probe.step
            for name, figures in probe.figures.items():
                for figure, value in figures.as_dict().items():
                    self._writer.add_scalar(f"{self._prefix}.{figure}/{name}", value, step)
            if self.writes_total and probe.figures:
                for figure, value in TensorFigures.together(probe.figures.values()).as_dict().items():
                    self._writer.add_scalar(f"{self._prefix}.total/{figure}", value, step)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Write no more; the user hears of it once."""
        self.is_off, self._writer = True, NOWHERE
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._untold = (
            f"the log of the compressor's inside was turned off on this rank, as it failed ({text}); training goes on "
            "without it. Call log_to() again with a writer that works"
        )
        if not self._waits:
            self.remind()

    def tell(self) -> None:
        """Where nothing is half done: warn of a failure.

        Warns:
            RuntimeWarning: once; it may have been turned into an exception.
        """
        text, self._untold = self._untold, None
        if text is not None:
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def remind(self) -> None:
        """Anywhere else: show the warning, even where warnings are exceptions."""
        try:
            self.tell()
        except RuntimeWarning as warning:
            warnings.showwarning(warning, RuntimeWarning, __file__, 0)


class EngineMetrics:
    """Mixed into an engine: the log, and the probes of its exchanges."""

    _exchanges: list[Exchange]
    _log: Log | None = None
    _last_metrics: Metrics | None = None

    def log_to(self, writer: object, every: int = 100, prefix: str = "compression") -> None:
        """See :meth:`CompressorMetrics.log_to`; for an optimizer that is its own compressor."""
        self.use_log(None if writer is None else Log(writer, every, prefix, waits=True))

    def use_log(self, log: Log | None) -> None:
        """Look into all exchanges for a log, or no longer; what was seen last can still be read then."""
        if log is None and self._log is not None:
            self._last_metrics = self.inside
        self._log = log
        for exchange in self._exchanges:
            exchange.probe = None
        self._watch()

    @property
    def inside(self) -> Metrics:
        """See :attr:`CompressorMetrics.inside`."""
        if self._log is None:
            return self._last_metrics or Metrics(nothing=OFF)
        return Metrics.into(e.probe for e in self._exchanges if e.probe is not None)

    def _watch(self) -> None:
        """Look into those exchanges that are new, too."""
        if self._log is None:
            return
        self._log.writes_total = len(self._exchanges) <= 1
        for exchange in self._exchanges:
            if exchange.probe is None:
                exchange.probe = Probe(exchange.layout, self._log)

    def _tell_of_log(self) -> None:
        """After a step, where nothing is half done."""
        if self._log is not None:
            self._log.tell()


class CompressorMetrics:
    """Mixed into a compressor: its log, and the metrics of the latest step that was measured."""

    engine: EngineMetrics | None
    is_bound: bool
    _log: Log | None = None
    _guest: Log | None = None

    def log_to(self, writer: object, every: int = 100, prefix: str = "compression") -> None:
        """Write, every so many steps, what this rank's residuals hold back of each tensor; or stop that.

        It asks no other rank, so it may be called on all of them or on one. Training has the same bits with and
        without it. A writer that raises is warned of once, and turned off.

        Args:
            writer: anything with ``add_scalar(tag, value, step)``, like ``torch.utils.tensorboard.SummaryWriter``; in
                TensorFlow also a writer of ``tf.summary``. None turns the log off.
            every: the number of a step that is looked at is a multiple of this.
            prefix: tags are ``<prefix>.<figure>/<tensor>`` and ``<prefix>.total/<figure>``; docs/inside.md has the
                figures.

        Raises:
            ConfigError: the writer has no ``add_scalar``, or ``every`` is no number of steps.
        """
        self._use_log(None if writer is None else Log(self._writer_of(writer), every, prefix, waits=self._waits))

    def _use_log(self, log: Log | None) -> None:
        self._log, self._guest = log, None
        self._attach(log)

    def _attach(self, log: Log | None) -> None:
        if self.engine is not None:
            self.engine.use_log(log)

    def begin_log(self, writer: object, every: int = 100, prefix: str = "compression") -> Log:
        """:meth:`log_to` for a while: a log that is on meanwhile rests, and goes on after :meth:`end_log`.

        Of several the one that began last writes, whatever becomes of the others; :meth:`log_to` ends it.

        Returns:
            What :meth:`end_log` is to be given.

        Raises:
            ConfigError: as :meth:`log_to`.
        """
        guest = Log(self._writer_of(writer), every, prefix, waits=self._waits)
        self._guest = guest
        self._attach(guest)
        return guest

    def end_log(self, guest: Log) -> None:
        """End what :meth:`begin_log` has begun, unless another log has taken its place."""
        if self._guest is guest:
            self._use_log(self._log)

    @property
    def log_rests(self) -> bool:
        """Whether a log of :meth:`log_to` is on that writes nothing now."""
        return self._log is not None and self._guest is not None

    @property
    def inside(self) -> Metrics:
        """The latest step that was looked at, by the tensors' names; this rank's own figures."""
        if self.engine is not None:
            return self.engine.inside
        unseen = ALONE if self.is_bound else UNBOUND
        return Metrics(nothing=OFF if self._log is None and self._guest is None else unseen)

    _waits = False
    """Whether :meth:`Log.tell` is called after steps."""

    def _writer_of(self, writer: object) -> Any:
        """What has ``add_scalar``; an adapter knows its framework's writers."""
        return writer
