"""What compressing, and the dense way, cost this process besides the network: steps of one tensor with nobody else.

The steps are those of the real exchange over a transport that answers at once, so whatever a compressor does is in
them. The fastest step counts: what else the machine has to do only adds. P = number of ranks.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dgc.core.config.config import DGCConfig
from dgc.core.exchange.exchange import Exchange
from dgc.core.kernels.base import Kernels
from dgc.core.kernels.choose import choose_kernels
from dgc.core.state.layout import Parameter, make_layout

SHAPE = (1024, 1024)
"""Of the tensor: gradient, u, v and result take 16 MiB together."""

WARM_STEPS, STEPS = 4, 5
"""The first ones do not count: pages are touched, and thresholds of selections settle."""
_SHIFT = 4096
FEW, MORE = 2, 4
"""Numbers of ranks that are tried; what a further rank's message costs to read is the difference."""


class Echo:
    """A transport whose other ranks always send what this one does, at no cost."""

    name = "echo"
    rank = 0

    def __init__(self, size: int) -> None:
        """Stand for ``size`` ranks."""
        self.size = size

    def allgather(self, message: np.ndarray, out: np.ndarray) -> None:
        """Copy the message to every rank's place."""
        out[...] = message

    def allreduce(self, array: np.ndarray, op: str = "sum") -> None:
        """Leave the values."""

    def close(self) -> None:
        """Hold nothing."""


@dataclass(frozen=True)
class Work:
    """Seconds an element of a float32 tensor, from its gradient to the updated parameter, without the network."""

    sparse: float
    dense: float


_known: dict[str, Work] = {}


def measure_work(config: DGCConfig, ranks: int, entries_alone: bool) -> Work:
    """Measure, once in a process for the same arguments. Talks to nobody.

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
) -> Work:
    """As :func:`measure_work`, with these kernels and this clock."""
    config = last_level(config)
    plain = dataclasses.replace(config, algorithm="dgc", own=None, exclude=("*",), indices="uint16", values="float16")
    few, more = (_step_seconds(config, size, entries_alone, kernels, clock) for size in (FEW, MORE))
    dense = _step_seconds(plain, FEW, False, kernels, clock)
    for_each = max(0.0, more - few) / (MORE - FEW)
    elements = float(np.prod(SHAPE))
    return Work(max(few + (ranks - FEW) * for_each, 0.0) / elements, dense / elements)


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
        discardable=False,
        exchange="sparse",
    )


def _step_seconds(
    config: DGCConfig, ranks: int, entries_alone: bool, kernels: Kernels, clock: Callable[[], float]
) -> float:
    layout = make_layout([Parameter("trial", SHAPE, "float32")], config)
    exchange = Exchange(layout, config, Echo(ranks), kernels)
    exchange.holds = entries_alone and config.sparse_updates
    values = np.random.default_rng(0).standard_normal(layout.numel + _SHIFT * (WARM_STEPS + STEPS), np.float32)
    parameter, result, times = np.zeros(layout.numel, np.float32), np.zeros(layout.numel, np.float32), []
    try:
        for number in range(WARM_STEPS + STEPS):
            # Another gradient in each step, as in training: one and the same would make residuals grow steadily.
            gradient = values[_SHIFT * number :][: layout.numel]
            start = clock()
            exchange.submit(0, gradient, result, parameter)
            exchange.finish()
            if not exchange.held():
                np.subtract(parameter, result, out=parameter)  # what the optimizer does with a dense result
            if number >= WARM_STEPS:
                times.append(clock() - start)
    finally:
        exchange.close()
    return min(times)
