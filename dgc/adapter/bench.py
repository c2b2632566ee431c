"""``python -m dgc bench``: measure the time of a step's exchange in this job: dense, in 16 bits, and with DGC.

DGC sends as many entries as ``steps=`` chooses for a training of the given length with the given optimizer. The command
times real exchanges of one tensor over the job's transport, while no backward pass runs. The slowest rank's time
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
from typing import Any, NamedTuple

import numpy as np

from dgc.adapter.agreement import agree_or_raise
from dgc.core.collectives import Transport, gather_values
from dgc.core.compressors import make_config
from dgc.core.config import DGCConfig, Schedule
from dgc.core.exchange.exchange import Exchange
from dgc.core.exchange.step import StepOptions
from dgc.core.kernels import choose_kernels
from dgc.core.layout import Parameter, make_layout
from dgc.errors import ConfigError

LAUNCH = (
    "start one process for each rank: torchrun --nproc-per-node 2 -m dgc bench, or horovodrun -np 2 python -m dgc bench"
)

_COLUMNS, _ROWS = 1024, 4096  # the largest shape of the tensor that is exchanged: 16 MiB of gradient
_WARM_STEPS = 3  # the first steps are not timed: they touch memory for the first time, and thresholds settle
_STEPS = 7  # timed steps, whose median counts
_SHIFT = 4096  # the gradient of each step begins this much further in the random values


class Phase(NamedTuple):
    """Consecutive steps of a training in which DGC sends the same share of the entries."""

    density: float
    steps: int


class Training(NamedTuple):
    """A training whose exchange is measured, and its compressor's option."""

    config: DGCConfig
    phases: list[Phase]
    option: str


def training_of(arguments: argparse.Namespace) -> Training:
    """Return the training that the command line describes.

    Raises:
        ConfigError: an option is out of range, or the library would warn about the sparsity.
    """
    steps, sparsity, adaptive = arguments.steps, arguments.sparsity, arguments.optimizer == "adamw"
    fixed = {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0}
    config = make_config({"steps": steps, **fixed}).suited(adaptive)
    if sparsity is None:
        ramp = min(Schedule(config.sparsity, length=config.rampup_step).ramp_end(), steps)
        phases = [Phase(1.0 - config.sparsity[0], ramp), Phase(1.0 - config.sparsity[-1], steps - ramp)]
        return Training(config, [phase for phase in phases if phase.steps], f"steps={steps}")
    config = make_config({"sparsity": sparsity, **fixed})
    if adaptive and config.is_thin:
        raise ConfigError(
            f"--sparsity {sparsity:g} sends too few entries for AdamW, which learns far less then; leave it out, or "
            "give --optimizer sgd"
        )
    return Training(config, [Phase(1.0 - sparsity, steps)], f"sparsity={sparsity:g}")


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds that the exchange and momentum take in one step; ``sparse`` has one number for each phase."""

    dense: float
    half: float
    sparse: tuple[float, ...]

    def advice(self, training: Training) -> str:
        """Return the option to set: a dense one unless compression saves a tenth of the time of the training."""
        steps = [phase.steps for phase in training.phases]
        sparse = sum(n * seconds for n, seconds in zip(steps, self.sparse, strict=True)) / sum(steps)
        least = min(self.half, sparse)
        if self.dense <= 1.1 * least:
            return "stay dense: no compression is faster here"
        if least == self.half:
            return "compression=dgc.Compression.fp16, or DDP's fp16_compress_hook"
        return f"compression=dgc.Compression.dgc({training.option})"


def measure(transport: Transport, elements: int, training: Training, *, defers: bool = False) -> Costs:
    """Return the seconds for a model of ``elements`` parameters, the same on all ranks. Collective.

    If ``defers``, received entries are applied one by one, as plain SGD does in PyTorch on a CPU.
    """
    rows = min(_ROWS, max(1, elements // _COLUMNS))
    config = training.config
    sparse = [dataclasses.replace(config, sparsity=(1.0 - p.density,), rampup_step=1) for p in training.phases]
    with contextlib.ExitStack() as opened:
        made: list[_TimedSteps] = []

        def make() -> dict[str, Any]:
            for each in (dataclasses.replace(config, exclude=("*",)), *sparse):
                made.append(opened.enter_context(contextlib.closing(_TimedSteps(each, transport, rows, defers))))
            return {}

        agree_or_raise(transport, make, "measurements")
        dense, *each_phase = (_median(steps.take) for steps in made)
    whole = np.zeros(rows * _COLUMNS, np.float32)
    saved = _median(lambda: transport.allreduce(whole)) - _median(lambda: transport.allreduce(whole[::2].copy()))
    half = dense - min(max(saved, 0.0), dense)
    seconds = np.array([dense, half, *each_phase]) * (elements / whole.size)
    transport.allreduce(seconds, "max")
    dense, half, *each_phase = seconds.tolist()
    return Costs(dense, half, tuple(each_phase))


class _TimedSteps:
    """Runs steps of one tensor, from the gradient to the updated parameter."""

    def __init__(self, config: DGCConfig, transport: Transport, rows: int, defers: bool) -> None:
        layout = make_layout([Parameter("tensor", (rows, _COLUMNS), "float32")], config)
        self._exchange = Exchange(layout, config, transport, choose_kernels("cpu"))
        self._options = StepOptions(defers=defers and not config.exclude)
        self._numel, self._taken = layout.numel, 0
        last = _SHIFT * (_WARM_STEPS + _STEPS)
        self._values = np.random.default_rng(transport.rank).standard_normal(layout.numel + last, np.float32)
        self._parameter, self._result = np.zeros(layout.numel, np.float32), np.zeros(layout.numel, np.float32)

    def take(self) -> None:
        # Each step has another gradient, as in training. With a constant gradient, residuals would grow steadily.
        gradient = self._values[_SHIFT * self._taken :][: self._numel]
        self._taken += 1
        self._exchange.begin(self._options)
        self._exchange.submit(0, gradient, self._result, self._parameter)
        self._exchange.finish()
        if not self._exchange.deferred():
            np.subtract(self._parameter, self._result, out=self._parameter)  # this is what the optimizer would do

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


def run_bench(arguments: argparse.Namespace, connect: Callable[[], Transport]) -> int:
    """Measure, and write the result on rank 0. If an error prevents that, write one line about it and return 1."""
    try:
        elements = elements_of(arguments.model) if arguments.model else arguments.parameters
        if elements < 1:
            raise ConfigError(f"--parameters is {elements}; allowed: a number of parameters >= 1")
        training = training_of(arguments)
        transport = connect()
        if transport.size < 2:
            raise ConfigError(f"one process exchanges nothing; {LAUNCH}")
        hosts = len(set(gather_values(transport, socket.gethostname())))
        found = measure(transport, elements, training, defers=arguments.optimizer == "sgd")
    except Exception as error:
        sys.stderr.write(f"error: {str(error).splitlines()[0]}\n")
        return 1
    if transport.rank == 0:
        ranks = f"{transport.size} ranks on {'one host' if hosts == 1 else f'{hosts} hosts'} over {transport.name}"
        lines = [f"{ranks}, {elements:,} parameters, {arguments.optimizer}; exchange and momentum of a step:"]
        ways = [("dense float32", found.dense, ""), ("16 bits", found.half, "")]
        for phase, seconds in zip(training.phases, found.sparse, strict=True):
            ways.append((f"DGC, {phase.density:.1%}", seconds, f"   in {phase.steps:,} steps"))
        lines += [f"  {way:<16}{1e3 * seconds:10.1f} ms{where}" for way, seconds, where in ways]
        lines.append(f"  {'set' if hosts > 1 else 'on this host alone'}: {found.advice(training)}")
        if hosts == 1:
            lines.append("  no network was seen, only this host's memory: for several hosts start bench on them")
        sys.stdout.write("\n".join([*lines, ""]))
    transport.close()
    return 0
