"""``python -m dgc bench``: measure the time of a step's exchange in this job: dense, in 16 bits, and with DGC.

``--sparsity`` sets the share of entries that DGC sends. Without it, ``steps=`` chooses the share. The command times
real exchanges of one tensor over the job's transport, while no backward pass runs. The slowest rank's time counts. The
time for a larger model is computed in proportion to its size; for other numbers of ranks see :func:`predict`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dgc.adapter.agreement import agree_or_raise
from dgc.core.collectives import Transport, gather_values
from dgc.core.compressors import make_config
from dgc.core.config import DGCConfig, Schedule
from dgc.core.exchange.encoders import entry_plan
from dgc.core.exchange.exchange import Exchange
from dgc.core.exchange.step import StepOptions
from dgc.core.kernels import choose_kernels
from dgc.core.layout import Layout, Parameter, make_layout
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
    steps, sparsity, adaptive = arguments.steps, arguments.sparsity, arguments.optimizer != "sgd"
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
        """Return the fastest option, or "stay dense" if a dense exchange takes at most 1.1 times as long."""
        steps = [phase.steps for phase in training.phases]
        sparse = sum(n * seconds for n, seconds in zip(steps, self.sparse, strict=True)) / sum(steps)
        least = min(self.half, sparse)
        if self.dense <= 1.1 * least:
            return "stay dense: no compression is faster here"
        if least == self.half:
            return "compression=dgc.Compression.fp16, or DDP's fp16_compress_hook"
        return f"compression=dgc.Compression.dgc({training.option})"


class Found(NamedTuple):
    """The measured times, in seconds.

    Attributes:
        costs: a dense step, a step in 16 bits, and each phase's step.
        gathered: the last phase's step with ``exchange="gather"``.
        applied: adding up the received entries in that step.
        a_round: one round of a ring.
        a_byte: one byte that passes through a rank.
    """

    costs: Costs
    gathered: float
    applied: float
    a_round: float
    a_byte: float


def traffic_of(layout: Layout, config: DGCConfig, density: float, ranks: int) -> np.ndarray:
    """Return :meth:`BucketPlan.traffic`, summed over the buckets, for three steps: dense, gathered, as dgc chooses."""
    gathering = dataclasses.replace(config, exchange="gather")
    ways = ((gathering, None), (gathering, density), (config, density))
    plans = [[entry_plan(b, how, each, ranks) for b in layout.buckets] for how, each in ways]
    return np.array([np.sum([plan.traffic(ranks) for plan in each], axis=0) for each in plans])


def predict(found: Found, ranks: int, sizes: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Return the seconds of a step (dense, gathered, as dgc chooses) by number of ranks.

    A step takes the time of its collectives, a time for each entry that a rank adds up, and a fixed time. ``found`` was
    measured on ``ranks`` ranks, and ``sizes`` has the :func:`traffic_of` by number of ranks.
    """

    def row(seconds: np.ndarray, load: np.ndarray) -> np.ndarray:
        """Return the seconds. If no bucket has owners, gathering is dgc's choice: use one time in both columns."""
        return seconds if (load[1] != load[2]).any() else seconds[[0, 2, 2]]

    prices = np.array([found.a_round, found.a_byte, found.applied / max(sizes[ranks][1, 2], 1)])
    measured = row(np.array([found.costs.dense, found.gathered, found.costs.sparse[-1]]), sizes[ranks])
    fixed = np.maximum(measured - sizes[ranks] @ prices, 0.0)
    return {n: measured if n == ranks else row(fixed + load @ prices, load) for n, load in sizes.items()}


def measure(transport: Transport, elements: int, training: Training, *, defers: bool = False) -> Found:
    """Measure steps for a model of ``elements`` parameters. Every rank returns the slowest rank's times. Collective.

    If ``defers``, the sums of entries are not written into dense results, as with plain SGD in PyTorch on a CPU.
    """
    rows = min(_ROWS, max(1, elements // _COLUMNS))
    config = training.config
    phases = [dataclasses.replace(config, sparsity=(1.0 - p.density,), rampup_step=1) for p in training.phases]
    gathering = dataclasses.replace(phases[-1], exchange="gather")
    with contextlib.ExitStack() as opened:
        made: list[_TimedSteps] = []

        def make() -> dict[str, Any]:
            for each in (dataclasses.replace(config, exclude=("*",)), *phases, gathering):
                made.append(opened.enter_context(contextlib.closing(_TimedSteps(each, transport, rows, defers))))
            return {}

        agree_or_raise(transport, make, "measurements")
        dense, *sparse = (_median(steps.take) for steps in made)
        applied = statistics.median(made[-1].applied[-_STEPS:])
    whole, ranks, small = np.zeros(rows * _COLUMNS, np.float32), transport.size, np.zeros(256, np.uint8)
    came, summed = np.zeros((ranks, small.size), np.uint8), _median(lambda: transport.allreduce(whole))
    half = dense - min(max(summed - _median(lambda: transport.allreduce(whole[::2].copy())), 0.0), dense)
    a_round = _median(lambda: transport.allgather(small, came)) / (ranks - 1)
    a_byte = max(0.0, summed / (ranks - 1) - 2 * a_round) * ranks / 2 / whole.nbytes
    seconds = np.array([a_round, a_byte, *np.array([dense, half, applied, *sparse]) * (elements / whole.size)])
    transport.allreduce(seconds, "max")
    a_round, a_byte, dense, half, applied, *sparse, gathered = seconds.tolist()
    return Found(Costs(dense, half, tuple(sparse)), gathered, applied, a_round, a_byte)


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
        self.applied: list[float] = []

    def take(self) -> None:
        # The gradient changes in every step, as in training. With a constant gradient, residuals would grow steadily.
        gradient = self._values[_SHIFT * self._taken :][: self._numel]
        self._taken += 1
        self._exchange.begin(self._options)
        self._exchange.submit(0, gradient, self._result, self._parameter)
        self._exchange.finish()
        if not self._exchange.deferred():
            np.subtract(self._parameter, self._result, out=self._parameter)  # this is what the optimizer would do
        self.applied.append(self._exchange.stats.last.seconds["apply"])

    def close(self) -> None:
        self._exchange.close()


def _median(step: Callable[[], None]) -> float:
    times = []
    for _ in range(_WARM_STEPS + _STEPS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[_WARM_STEPS:])


def parameters_of(model: str) -> list[Parameter]:
    """Call the function that ``model`` names as "module:function"; return its model's parameters."""
    module, _, name = model.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module), name)()
        return [Parameter(name, tuple(tensor.shape), "float32") for name, tensor in made.named_parameters()]
    except Exception as error:
        raise ConfigError(f"--model {model}: {type(error).__name__}: {error}; give module:function") from error


def run_bench(arguments: argparse.Namespace, connect: Callable[[], Transport]) -> int:
    """Measure, and write the result on rank 0. If an error prevents that, write one line about it and return 1."""
    try:
        count = max(1, arguments.parameters // (_ROWS * _COLUMNS))
        ends = [arguments.parameters * i // count for i in range(count + 1)]
        parts = [Parameter(str(a), (1, b - a), "float32") for a, b in itertools.pairwise(ends)]
        parameters = parameters_of(arguments.model) if arguments.model else parts
        elements = sum(each.numel for each in parameters)
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
        costs, density = found.costs, training.phases[-1].density
        ranks = f"{transport.size} ranks on {'one host' if hosts == 1 else f'{hosts} hosts'} over {transport.name}"
        lines = [f"{ranks}, {elements:,} parameters, {arguments.optimizer}; exchange and momentum of a step:"]
        ways = [("dense float32", costs.dense, ""), ("16 bits", costs.half, "")]
        for phase, seconds in zip(training.phases, costs.sparse, strict=True):
            ways.append((f"DGC, {phase.density:.1%}", seconds, f" a step, in {phase.steps:,} steps"))
        lines += [f"  {way:<16}{1e3 * seconds:10.1f} ms{where}" for way, seconds, where in ways]
        lines.append("  where the dense exchange takes under a tenth of your training's step, there is little to gain")
        lines.append(f"  {'set' if hosts > 1 else 'on this host alone'}: {costs.advice(training)}")
        if hosts == 1:
            lines.append("  no network was seen, only this host's memory: for several hosts start bench on them")
        layout, config = make_layout(parameters, training.config), training.config
        sizes = {
            n: traffic_of(layout, config, density, n) for n in sorted({transport.size, *(2**i for i in range(1, 11))})
        }
        link = f"a latency of {1e6 * found.a_round:.0f} us"
        if found.a_byte > 1e-11:  # else the model is too small to time its bytes
            link += f" and {1e-6 / found.a_byte:,.0f} MB/s"
        memory = ", if the network were as fast as this memory" if hosts == 1 else ""
        lines.append(f"on other numbers of ranks{memory}, DGC with {density:.1%}, in ms (from {link}, measured here):")
        lines.append("  ranks       dense    gathered  as dgc chooses")
        for n, row in predict(found, transport.size, sizes).items():
            cells = "{:12.1f}{:12.1f}{:16.1f}".format(*1e3 * row)
            lines.append(f"  {n:5,}{cells}   {'measured' if n == transport.size else 'predicted'}")
        sys.stdout.write("\n".join([*lines, ""]))
    transport.close()
    return 0
