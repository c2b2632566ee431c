"""Step -> sparsity: Paddle's ramp-up, which the paper's exponential warm-up is one list of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dgc.core.config.checks import plain, require_integer
from dgc.errors import ConfigError

DENSITY_DIGITS = 12
"""Of a density in a log: 1 - 0.999 has the float64 0.0010000000000000009."""


@dataclass(frozen=True)
class Schedule:
    """Sparsity over the steps.

    Before ``begin`` everything is dense. From then on the list is walked through in ``length`` steps, each entry for
    an equal part of them, and the last entry stays: ``i = int((step - begin) * len / length)``, clamped to the end.

    Source: Paddle's ``DGCMomentumOptimizer`` (its sparsity, rampup_begin_step, rampup_step).
    """

    sparsity: tuple[float, ...]
    begin: int = 0
    length: int = 1

    def is_dense(self, step: int) -> bool:
        """Whether ``step`` lies before the ramp-up, where the exchange is dense."""
        return step < self.begin

    def density(self, step: int) -> float:
        """Share of entries sent at ``step``: 1 before the ramp-up, ``1 - sparsity`` after its begin."""
        if self.is_dense(step):
            return 1.0
        i = (step - self.begin) * len(self.sparsity) // self.length
        return 1.0 - self.sparsity[min(i, len(self.sparsity) - 1)]

    def ramp_end(self) -> int:
        """First step at which the last sparsity of the list is in force."""
        count = len(self.sparsity)
        return self.begin + -(-(count - 1) * self.length // count)


def of_steps(steps: int | None = None, **options: Any) -> dict[str, Any]:
    """Options of DGC for a training of so many steps, None: the others alone.

    The density is 1/64; from 6,400 steps on each entry is sent a hundred times, and from 100,000 on 0.1 % a step.
    There is no warm-up of the sparsity and no masking of momentum, which both cost progress at the beginning.

    Args:
        steps: of the optimizer, in the whole training.
        **options: the others that the user gives; masking among them stays.

    Raises:
        ConfigError: ``steps`` is no integer from 1 on, or the sparsity is given beside it.
    """
    if steps is None:
        return options
    require_integer("steps", steps := plain(steps), 1)
    if both := {"sparsity", "rampup_step"} & options.keys():
        raise ConfigError(f"steps={steps} chooses the sparsity: leave {' and '.join(sorted(both))} out, or steps")
    density = min(1 / 64, max(0.001, 100 / steps))
    return {"momentum_masking": False, **options, "sparsity": 1.0 - density}


def entries_to_send(numel: int, density: float) -> int:
    """Return k = max(1, int(n * density)), at most n; 0 for an empty tensor.

    ``1 - 0.999`` is a little above 0.001 in float64 and ``1 - 0.9`` a little below 0.1, so a relative 1e-9 is added
    before truncating: k is what a reader computes by hand.
    """
    if numel == 0:
        return 0
    return min(numel, max(1, int(numel * density * (1 + 1e-9))))
