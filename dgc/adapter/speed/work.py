"""What compressing, and the dense way, cost this process besides the network: steps of one tensor in one process.

The steps are those of the real exchange over a transport that answers at once, so whatever a compressor does is in
them. The fastest step counts: what else the machine has to do only adds. P = number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dgc.core.config import DGCConfig
from dgc.core.exchange.exchange import Exchange
from dgc.core.kernels.base import Kernels
from dgc.core.kernels.choose import choose_kernels
from dgc.core.layout import Parameter, make_layout
from dgc.core.transport import Transport

SHAPE = (1024, 1024)
"""Of the tensor: gradient, u, v and result take 16 MiB together."""

WARM_STEPS = 4
"""These do not count: pages are touched, and thresholds of selections settle."""
ROUNDS, STEPS = 4, 3
"""Those that are compared take turns, so that something else that runs for a tenth of a second hits them all."""
_SHIFT = 4096
FEW, MORE = 2, 4
"""Numbers of ranks that are tried; what a further rank's message costs to read is the difference."""


class Echo(Transport):
    """A transport whose other ranks always send what this one does, at no cost."""

    name = "echo"
    rank = 0

    def __init__(self, size: int) -> None:
        """Stand for ``size`` ranks."""
        self.size = size

    def allgather(self, message: np.ndarray, out: np.ndarray) -> None:  # noqa: D102
        out[...] = message

    def allreduce(self, array: np.ndarray, op: str = "sum") -> None:
        """Leave the values."""

    def close(self) -> None:
        """Hold nothing."""


@dataclass(frozen=True)
class Cost:
    """Seconds an element of a float32 tensor, from its gradient to the updated parameter, without the network."""

    sparse: float
    dense: float


_known: dict[str, Cost] = {}


def measure_cost(config: DGCConfig, ranks: int, entries_alone: bool) -> Cost:
    """Measure, once in a process for the same arguments. Local: no communication.

    Args:
        config: of one compressor.
        ranks: P.
        entries_alone: whether the caller may update parameters by the entries that came.
    """
    key = repr((config.describe(), ranks, entries_alone))
    if key not in _known:
        _known[key] = time_work(config, ranks, entries_alone, choose_kernels("cpu"))
    return _known[key]


def time_work(
    config: DGCConfig, ranks: int, entries_alone: bool, kernels: Kernels, clock: Callable[[], float] = time.perf_counter
) -> Cost:
    """As :func:`measure_cost`, with these kernels and this clock."""
    config = last_level(config)
    plain = dataclasses.replace(config, algorithm="dgc", own=None, exclude=("*",))
    with contextlib.ExitStack() as trials:
        kinds = ((config, FEW, entries_alone), (config, MORE, entries_alone), (plain, FEW, False))
        made = [trials.enter_context(contextlib.closing(_Trial(*kind, kernels))) for kind in kinds]
        few, more, dense = _fastest(made, clock)
    for_each = max(0.0, more - few) / (MORE - FEW)
    elements = float(np.prod(SHAPE))
    return Cost(max(few + (ranks - FEW) * for_each, 0.0) / elements, dense / elements)


def last_level(config: DGCConfig) -> DGCConfig:
    """The options of a compressor past its ramp-up, with everything sparsified in one bucket."""
    return dataclasses.replace(
        config,
        momentum=0.9 if config.momentum is None else config.momentum,
        sparsity=config.sparsity[-1:],
        rampup_begin_step=0,
        rampup_step=1,
        min_numel=0,
        include=(),
        exclude=(),
        bucket_bytes=2**30,
        exchange="sparse",
    )


def _fastest(trials: Sequence[_Trial], clock: Callable[[], float]) -> list[float]:
    """Seconds of the fastest step of each."""
    for trial in trials:
        for _ in range(WARM_STEPS):
            trial.step(clock)
    best = [math.inf] * len(trials)
    for _ in range(ROUNDS):
        for number, trial in enumerate(trials):
            best[number] = min(best[number], *(trial.step(clock) for _ in range(STEPS)))
    return best


class _Trial:
    """Steps of one tensor."""

    def __init__(self, config: DGCConfig, ranks: int, entries_alone: bool, kernels: Kernels) -> None:
        layout = make_layout([Parameter("trial", SHAPE, "float32")], config)
        self._exchange = Exchange(layout, config, Echo(ranks), kernels)
        self._exchange.defers = entries_alone and config.sparse_updates
        self._numel, self._steps = layout.numel, 0
        last = _SHIFT * (WARM_STEPS + ROUNDS * STEPS)
        self._values = np.random.default_rng(0).standard_normal(layout.numel + last, np.float32)
        self._parameter, self._result = np.zeros(layout.numel, np.float32), np.zeros(layout.numel, np.float32)

    def step(self, clock: Callable[[], float]) -> float:
        """Seconds of a step."""
        # Another gradient in each step, as in training: one and the same would make residuals grow steadily.
        gradient = self._values[_SHIFT * self._steps :][: self._numel]
        self._steps += 1
        start = clock()
        self._exchange.submit(0, gradient, self._result, self._parameter)
        self._exchange.finish()
        if not self._exchange.deferred():
            np.subtract(self._parameter, self._result, out=self._parameter)  # what the optimizer does with it
        return clock() - start

    def close(self) -> None:
        """End the exchange."""
        self._exchange.close()
