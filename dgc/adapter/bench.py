"""``python -m dgc bench``: the time of a step's exchange in this job, dense, in 16 bits and with DGC.

It times real exchanges of one tensor over the job's transport, while no backward pass runs. The slowest rank's time
counts. The time for a larger model is computed in proportion to its size.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dgc.adapter.agreement import agree_or_raise
from dgc.core.collectives import Transport, gather_values
from dgc.core.config import DGCConfig
from dgc.core.exchange.exchange import Exchange
from dgc.core.exchange.step import StepOptions
from dgc.core.kernels import choose_kernels
from dgc.core.layout import Parameter, make_layout
from dgc.errors import ConfigError

LAUNCH = (
    "start one process for each rank: torchrun --nproc-per-node 2 -m dgc bench, or horovodrun -np 2 python -m dgc bench"
)

_COLUMNS, _ROWS = 1024, 4096  # the largest shape of the tensor that is exchanged: 16 MiB of gradient
_WARM_STEPS = 3  # first steps, not timed: memory is touched and thresholds settle
_STEPS = 7  # timed steps, whose median counts
_SHIFT = 4096  # how far the gradient of the next step begins in the random values


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds that the exchange and momentum take in one step after the ramp-up."""

    dense: float
    half: float
    sparse: float

    def advice(self, sparsity: float) -> str:
        """Return which option to set. Stay dense unless compression saves a tenth of the time."""
        least = min(self.half, self.sparse)
        if self.dense <= 1.1 * least:
            return "stay dense: no compression is faster here"
        if least == self.half:
            return "compression=hvd.Compression.fp16, or DDP's fp16_compress_hook"
        return f"compression=dgc.Compression.dgc(sparsity={sparsity:g})"


def measure(transport: Transport, elements: int, sparsity: float) -> Costs:
    """Return the seconds for a model of ``elements`` parameters, the same on all ranks. Collective."""
    rows = min(_ROWS, max(1, elements // _COLUMNS))
    config = DGCConfig(momentum=0.9, nesterov=False, weight_decay=0.0, sparsity=(sparsity,))
    with contextlib.ExitStack() as opened:
        made: list[_TimedSteps] = []

        def make() -> dict[str, Any]:
            for each in (dataclasses.replace(config, exclude=("*",)), config):
                made.append(opened.enter_context(contextlib.closing(_TimedSteps(each, transport, rows))))
            return {}

        agree_or_raise(transport, make, "measurements")
        dense, sparse = (_median(steps.take) for steps in made)
    whole = np.zeros(rows * _COLUMNS, np.float32)
    saved = _median(lambda: transport.allreduce(whole)) - _median(lambda: transport.allreduce(whole[::2].copy()))
    half = dense - min(max(saved, 0.0), dense)
    seconds = np.array([dense, half, sparse]) * (elements / whole.size)
    transport.allreduce(seconds, "max")
    return Costs(*seconds.tolist())


class _TimedSteps:
    """Runs steps of one tensor, from the gradient to the updated parameter."""

    def __init__(self, config: DGCConfig, transport: Transport, rows: int) -> None:
        layout = make_layout([Parameter("tensor", (rows, _COLUMNS), "float32")], config)
        self._exchange = Exchange(layout, config, transport, choose_kernels("cpu"))
        self._options = StepOptions(defers=not config.exclude)
        self._numel, self._taken = layout.numel, 0
        last = _SHIFT * (_WARM_STEPS + _STEPS)
        self._values = np.random.default_rng(transport.rank).standard_normal(layout.numel + last, np.float32)
        self._parameter, self._result = np.zeros(layout.numel, np.float32), np.zeros(layout.numel, np.float32)

    def take(self) -> None:
        # Each step has another gradient, as in training: with a constant one residuals would grow steadily.
        gradient = self._values[_SHIFT * self._taken :][: self._numel]
        self._taken += 1
        self._exchange.begin(self._options)
        self._exchange.submit(0, gradient, self._result, self._parameter)
        self._exchange.finish()
        if not self._exchange.deferred():
            np.subtract(self._parameter, self._result, out=self._parameter)  # as the optimizer would

    def close(self) -> None:
        self._exchange.close()


def _median(step: Callable[[], None]) -> float:
    times = []
    for _ in range(_WARM_STEPS + _STEPS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return sorted(times[_WARM_STEPS:])[_STEPS // 2]


def elements_of(model: str) -> int:
    """Call the function that ``model`` names as "module:function"; return its model's number of parameters."""
    module, _, name = model.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module), name)()
        return sum(math.prod(parameter.shape) for _, parameter in made.named_parameters())
    except Exception as error:
        raise ConfigError(f"--model {model}: {type(error).__name__}: {error}; give module:function") from error


def run(arguments: argparse.Namespace, connect: Callable[[], Transport]) -> int:
    """Measure, and write the result on rank 0. If an error prevents that, write one line about it and return 1."""
    try:
        elements = elements_of(arguments.model) if arguments.model else arguments.parameters
        if elements < 1:
            raise ConfigError(f"--parameters is {elements}; allowed: a number of parameters >= 1")
        transport = connect()
        if transport.size < 2:
            raise ConfigError(f"one process exchanges nothing; {LAUNCH}")
        hosts = len(set(gather_values(transport, socket.gethostname())))
        found = measure(transport, elements, arguments.sparsity)
    except Exception as error:
        sys.stderr.write(f"error: {str(error).splitlines()[0]}\n")
        return 1
    if transport.rank == 0:
        ranks = f"{transport.size} ranks on {'one host' if hosts == 1 else f'{hosts} hosts'} over {transport.name}"
        lines = [f"{ranks}, {elements:,} parameters; exchange and momentum of a step:"]
        ways = (
            ("dense float32", found.dense),
            ("16 bits", found.half),
            (f"DGC, {1 - arguments.sparsity:.1%}", found.sparse),
        )
        lines += [f"  {way:<16}{1e3 * seconds:10.1f} ms" for way, seconds in ways]
        lines.append(f"  {'set' if hosts > 1 else 'on this host alone'}: {found.advice(arguments.sparsity)}")
        if hosts == 1:
            lines.append("  no network was seen, only this host's memory: for several hosts start bench on them")
        sys.stdout.write("\n".join([*lines, ""]))
    transport.close()
    return 0
