"""``python -m dgc bench``: measure the time of a step's exchange in this job: dense, in 16 bits, and with DGC.

``--sparsity`` sets the share of entries that DGC sends. Without it, ``steps=`` chooses the share. With AdamW the
command measures step-ahead error feedback, and with ``--classic`` the classic one of tapes. It times real exchanges of
one tensor over the job's transport, while no backward pass runs. The slowest rank's time counts. The time for a larger
model is computed in proportion to its size; for other numbers of ranks, and for the network that ``--bandwidth`` and
``--latency`` describe, see :func:`predict`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import os
import re
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
from dgc.core.config import AHEAD_DENSITIES, DGCConfig, Schedule
from dgc.core.exchange.choice import entry_plan
from dgc.core.exchange.exchange import Exchange
from dgc.core.kernels import choose_kernels
from dgc.core.layout import Layout, Parameter, make_layout
from dgc.core.step_ahead import StepAhead
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


@dataclasses.dataclass(frozen=True)
class Training:
    """A training whose exchange is measured, and its compressor's option."""

    chosen: DGCConfig  # for the optimizer, but not for the number of ranks
    steps: int
    option: str
    ranks: int = 2

    def on_ranks(self, ranks: int) -> Training:
        """Return the training for a number of ranks, on which the share of the entries may depend."""
        return dataclasses.replace(self, ranks=ranks)

    @property
    def config(self) -> DGCConfig:
        """The compressor's options."""
        return self.chosen.on_ranks(self.ranks)

    @property
    def phases(self) -> list[Phase]:
        """The parts of the training with different shares of the entries; a training of one step has one."""
        sparsities = self.config.sparsities
        ramp = min(Schedule(sparsities, length=self.config.rampup_step).ramp_end(), self.steps)
        phases = [Phase(1.0 - sparsities[0], ramp), Phase(1.0 - sparsities[-1], self.steps - ramp)]
        return [phase for phase in phases if phase.steps]

    @property
    def densities(self) -> list[float]:
        """The share of the entries in each phase."""
        return [phase.density for phase in self.phases]


def training_of(arguments: argparse.Namespace) -> Training:
    """Return the training that the command line describes.

    Raises:
        ConfigError: an option is out of range, or the library would warn about the sparsity.
    """
    steps, sparsity, adaptive = arguments.steps, arguments.sparsity, arguments.optimizer != "sgd"
    fixed: dict[str, Any] = {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0}
    given: dict[str, Any] = {"steps": steps} if sparsity is None else {"sparsity": sparsity}
    option = ", ".join(f"{name}={value!r}" for name, value in given.items())
    if arguments.classic and adaptive:
        given["error_feedback"] = "classic"
        option += ', error_feedback="classic"'
    config = make_config(given).suited(adaptive, steps_ahead=True)
    if not config.steps_ahead:
        config = dataclasses.replace(config, **fixed)
    if adaptive and config.is_thin:
        raise ConfigError(
            f"--sparsity {sparsity:g} sends too few entries for AdamW, which learns far less then; leave it out, or "
            "give --optimizer sgd"
        )
    return Training(config, steps, option)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds that the exchange and momentum take in one step; ``sparse`` has one number for each phase."""

    dense: float
    half: float
    sparse: tuple[float, ...]

    def fastest(self, training: Training) -> str:
        """Return "dense", "16 bits" or "DGC"; "dense" if it takes at most 1.1 times as long as the others."""
        steps = [phase.steps for phase in training.phases]
        sparse = sum(n * seconds for n, seconds in zip(steps, self.sparse, strict=True)) / sum(steps)
        least = min(self.half, sparse)
        return "dense" if self.dense <= 1.1 * least else "16 bits" if least == self.half else "DGC"

    def advice(self, training: Training) -> str:
        """Return the option of the fastest way."""
        return {
            "dense": "stay dense: no compression is faster here",
            "16 bits": "compression=dgc.Compression.fp16, or DDP's fp16_compress_hook",
            "DGC": f"compression=dgc.Compression.dgc({training.option})",
        }[self.fastest(training)]


class Link(NamedTuple):
    """Seconds that one round of a ring takes, and one byte that passes through a rank."""

    a_round: float
    a_byte: float

    @classmethod
    def described(cls, bandwidth: str | None, latency: str | None) -> Link | None:
        """Return the network that the command line describes; None if it describes none."""
        if bandwidth is None and latency is None:
            return None
        rate = _quantity("--bandwidth", bandwidth, "1gbit or 100mbit", {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9})
        return cls(_quantity("--latency", latency, "200us or 1ms", {"us": 1e-6, "ms": 1e-3}), 8 / rate)

    def __str__(self) -> str:
        # A small model's bytes cannot be timed.
        rate = 1e-6 / self.a_byte if self.a_byte > 1e-11 else 0.0
        speed = f" and {rate:,.0f} MB/s" if rate >= 10 else f" and {rate:.3g} MB/s" if rate else ""
        return f"a latency of {1e6 * self.a_round:.0f} us{speed}"


def _quantity(option: str, text: str | None, examples: str, units: dict[str, float]) -> float:
    """Return the value of an option in basic units.

    Raises:
        ConfigError: it is missing, or not a number > 0 with one of the ``units``.
    """
    found = re.fullmatch(r"([0-9.]+) ?([a-z]+)(/s)?", (text or "").lower())
    with contextlib.suppress(KeyError, ValueError):
        if found and (value := float(found[1]) * units[found[2]]) > 0:
            return value
    raise ConfigError(f"{option} is {text}; --bandwidth and --latency describe a network together: give {examples}")


class Found(NamedTuple):
    """The measured times, in seconds.

    Attributes:
        costs: a dense step, a step in 16 bits, and each phase's step.
        gathered: the last phase's step with ``exchange="gather"``.
        applied: adding up the received entries in that step.
        link: the network between the ranks.
    """

    costs: Costs
    gathered: float
    applied: float
    link: Link


def traffic_of(layout: Layout, training: Training, ranks: int) -> np.ndarray:
    """Return rounds, bytes and added entries of all buckets, for several steps on a number of ranks.

    The rows are a dense step, one in 16 bits, one with the last density gathered, and one with each density as dgc
    chooses.
    """
    training = training.on_ranks(ranks)
    config, densities = training.config, training.densities
    gathering = dataclasses.replace(config, exchange="gather")
    ways = ((gathering, None), (gathering, densities[-1]), *((config, density) for density in densities))
    plans = [[entry_plan(b, how, each, ranks) for b in layout.buckets] for how, each in ways]
    loads = [[(plan.traffic.rounds, plan.traffic.nbytes, plan.added) for plan in each] for each in plans]
    dense, *sparse = [np.sum(each, axis=0) for each in loads]
    return np.array([dense, dense * [1, 0.5, 1], *sparse])


def predict(
    found: Found, ranks: int, sizes: dict[int, np.ndarray], link: Link | None = None
) -> dict[int, tuple[Costs, float]]:
    """Return the :class:`Costs` and the seconds of a gathered step, by number of ranks.

    A step takes the time of its collectives, a time for each entry that a rank adds up, and a fixed time. ``found`` was
    measured on ``ranks`` ranks, and ``sizes`` has the :func:`traffic_of` by number of ranks. Rounds and bytes take as
    long as on ``link``, but not less than measured; None stands for the measured network.
    """

    def row(seconds: np.ndarray, load: np.ndarray) -> tuple[Costs, float]:
        dense, half, gathered, *sparse = seconds.tolist()
        # If no bucket has owners, gathering is dgc's choice: use one time for both.
        return Costs(dense, half, tuple(sparse)), gathered if (load[2] != load[-1]).any() else sparse[-1]

    added = found.applied / max(sizes[ranks][2, 2], 1)
    here = np.array([*found.link, added])
    there = np.array([*(found.link if link is None else np.maximum(found.link, link)), added])
    costs = found.costs
    measured = np.array([costs.dense, costs.half, found.gathered, *costs.sparse])
    if (sizes[ranks][2] == sizes[ranks][-1]).all():
        measured[2] = measured[-1]
    fixed = np.maximum(measured - sizes[ranks] @ here, 0.0)
    return {
        n: row(measured if n == ranks and link is None else fixed + load @ there, load) for n, load in sizes.items()
    }


def measure(transport: Transport, elements: int, training: Training) -> Found:
    """Measure steps for a model of ``elements`` parameters. Every rank returns the slowest rank's times. Collective."""
    rows = min(_ROWS, max(1, elements // _COLUMNS))
    config = training.config
    phases = [dataclasses.replace(config, sparsity=(1.0 - p.density,), rampup_step=1) for p in training.phases]
    gathering = dataclasses.replace(phases[-1], exchange="gather")
    with contextlib.ExitStack() as opened:
        made: list[_TimedSteps] = []

        def make() -> dict[str, Any]:
            dense = dataclasses.replace(config, exclude=("*",), error_feedback="classic")
            for each in (dense, *phases, gathering):
                made.append(opened.enter_context(contextlib.closing(_TimedSteps(each, transport, rows))))
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
    return Found(Costs(dense, half, tuple(sparse)), gathered, applied, Link(a_round, a_byte))


class _TimedSteps:
    """Runs steps of one tensor, from the gradient to the updated parameter."""

    def __init__(self, config: DGCConfig, transport: Transport, rows: int) -> None:
        tensor, kernels = Parameter("tensor", (rows, _COLUMNS), "float32"), choose_kernels("cpu")
        last = _SHIFT * (_WARM_STEPS + _STEPS)
        self._values = np.random.default_rng(transport.rank).standard_normal(tensor.numel + last, np.float32)
        self._parameter, self._result = np.zeros(tensor.numel, np.float32), np.zeros(tensor.numel, np.float32)
        self._ahead: StepAhead | None = None
        if config.steps_ahead:
            self._ahead = StepAhead([tensor], config, transport, kernels, rescales=True)
            self._ahead.start([self._parameter])
            self._exchange = self._ahead.exchange
        else:
            self._exchange = Exchange(make_layout([tensor], config), config, transport, kernels)
        self._taken = 0
        self.applied: list[float] = []

    def take(self) -> None:
        # The gradient changes in every step, as in training. With a constant gradient, residuals would grow steadily.
        gradient = self._values[_SHIFT * self._taken :][: len(self._parameter)]
        self._taken += 1
        if self._ahead is not None:
            edited = self._ahead.is_edited([self._parameter])  # PyTorch's front ends look for edits
            np.subtract(self._parameter, gradient, out=self._result)
            own = [self._result]
            self._ahead.step(own, [gradient], [0.0], own, own, edited=edited)
            self._parameter, self._result = self._result, self._parameter
        else:
            self._exchange.begin()
            self._exchange.submit(0, gradient, self._result, self._parameter)
            self._exchange.finish()
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
        network = Link.described(arguments.bandwidth, arguments.latency)
        transport = connect()
        if transport.size < 2:
            raise ConfigError(f"one process exchanges nothing; {LAUNCH}")
        training = training.on_ranks(transport.size)
        hosts = len(set(gather_values(transport, socket.gethostname())))
        found = measure(transport, elements, training)
    except Exception as error:
        sys.stderr.write(f"error: {str(error).splitlines()[0]}\n")
        return 1
    if transport.rank == 0:
        costs = found.costs
        ranks = f"{transport.size} ranks on {'one host' if hosts == 1 else f'{hosts} hosts'} over {transport.name}"
        lines = [f"{ranks}, {elements:,} parameters, {arguments.optimizer}; what a step's exchange takes:"]
        ways = [("dense float32", costs.dense, ""), ("16 bits", costs.half, "")]
        for phase, seconds in zip(training.phases, costs.sparse, strict=True):
            ways.append((f"DGC, {phase.density:.1%}", seconds, f" a step, in {phase.steps:,} steps"))
        lines += [f"  {way:<16}{1e3 * seconds:10.1f} ms{where}" for way, seconds, where in ways]
        lines.append("  where the dense exchange takes under a tenth of your training's step, there is little to gain")
        layout = make_layout(parameters, training.config)
        counts = sorted({transport.size, *(2**i for i in range(1, 11))})
        rows = predict(found, transport.size, {n: traffic_of(layout, training, n) for n in counts}, network)
        if network or hosts > 1:
            where = f"on that network, with {transport.size} ranks, set" if network else "set"
            lines.append(f"  {where}: {rows[transport.size][0].advice(training)}")
            link = f"{network}, as you say" if network else f"{found.link}, measured here"
            share = f"{training.densities[-1]:.1%}"
            if training.config.steps_ahead:
                share = ", ".join(f"{later:.1%} on up to {most} ranks" for most, (_, later) in AHEAD_DENSITIES[:-1])
                share += f", {AHEAD_DENSITIES[-1][1][1]:.1%} on more"
            lines.append(f"by number of ranks, DGC with {share}, in ms (from {link}):")
            lines.append("  ranks       dense     16 bits    gathered  as dgc chooses   fastest")
            for n, (each, gathered) in rows.items():
                row = "".join(f"{1e3 * t:12.1f}" for t in (each.dense, each.half, gathered))
                known = "measured" if n == transport.size and not network else "predicted"
                lines.append(f"  {n:5,}{row}{1e3 * each.sparse[-1]:16.1f}   {each.fastest(training):<10}{known}")
            lines.append("  fastest over all steps of the training; dense, if no other way saves a tenth of its time")
        else:
            lines.append(f"  on this host alone: {costs.advice(training)}")
            lines.append(
                "  no network was seen, only this host's memory: start bench on several hosts, or describe the"
            )
            lines.append("  network between them: --bandwidth 1gbit --latency 200us")
        sys.stdout.write("\n".join([*lines, ""]))
    transport.close()
    return 0
