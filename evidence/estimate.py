"""How long the rest of a plan will take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evidence.application import Scale
from evidence.applications import CLASSES
from evidence.plan import Run

EXPECTED: dict[Scale, dict[str, float]] = {
    "full": {
        **{"image": 280, "image_keras": 380, "language": 170, "transformer": 330, "speech": 400},
        **{"transformer_short": 60, "speech_short": 150},
    },
    "quick": dict.fromkeys(CLASSES, 15.0) | {"image_keras": 30.0},
    "tiny": dict.fromkeys(CLASSES, 8.0) | {"image_keras": 20.0},
}
"""Seconds of a run on two cores, before any run of this plan has been seen."""


class Estimate:
    """From what runs took: those of the same application first, then all others by what was expected of them."""

    def __init__(self, scale: Scale, done: Mapping[Run, Mapping[str, Any]]) -> None:
        """Begin with what is known.

        Args:
            scale: how large the runs are.
            done: results of runs that are over.
        """
        self._expected = EXPECTED[scale]
        self._taken: dict[str, list[float]] = {}
        for run, found in done.items():
            self.add(run, found, float(found["seconds"]))

    def add(self, run: Run, found: Mapping[str, Any], seconds: float) -> None:
        """Take a finished run in.

        Args:
            run: which.
            found: its result; one that was resumed says by itself what it took.
            seconds: from its start to its end.
        """
        self._taken.setdefault(run.application, []).append(max(seconds, float(found["seconds"])))

    def of(self, application: str) -> float:
        """Seconds of one run."""
        taken = self._taken.get(application)
        if taken:
            return sum(taken) / len(taken)
        factors = [sum(taken) / len(taken) / self._expected[name] for name, taken in self._taken.items()]
        return self._expected[application] * (sum(factors) / len(factors) if factors else 1.0)

    def left(self, run: Run | None, seconds: float, progress: Mapping[str, Any], rest: Sequence[Run]) -> float:
        """Seconds until all is done.

        Args:
            run: the one that is under way.
            seconds: how long it has been.
            progress: what it says of itself, empty at its beginning.
            rest: those after it.
        """
        own = 0.0
        if run is not None:
            own = max(0.0, self.of(run.application) - seconds)
            if progress:
                made, resumed = progress["epoch"], progress["resumed_at"]
                own = seconds / max(1, made - resumed) * (progress["epochs"] - made)
        return own + sum(self.of(other.application) for other in rest)
