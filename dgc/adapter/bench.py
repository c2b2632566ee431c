"""``python -m dgc bench``: what the exchange of a step costs in this job, dense, in 16 bits and with DGC.

Two things are measured: what small collectives of this job's transport cost, and what compressing costs each process,
by steps of the real exchange of one tensor over a transport that answers at once. Times are those of the slowest rank,
of an exchange that nothing hides. n = elements of the model, P = number of ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from dgc.core.config import DGCConfig
from dgc.core.exchange.encoders import make_encoders
from dgc.core.exchange.exchange import Exchange
from dgc.core.kernels import choose_kernels
from dgc.core.layout import Parameter, make_layout
from dgc.core.transport import Transport
from dgc.errors import ConfigError
from dgc.transport.agreement import agree_or_raise, gather_values

Shapes: TypeAlias = Sequence[tuple[int, ...]]
Clock: TypeAlias = Callable[[], float]

LAUNCH = (
    "start one process for each rank: torchrun --nproc-per-node 2 -m dgc bench, or horovodrun -np 2 python -m dgc bench"
)

_MATRIX = 1024
"""Columns of the tensors that stand for a number of parameters."""

_REPETITIONS = 5
"""Of a collective that are timed, after one that is not; the median of them counts."""
_SMALL, _MIDDLE, _LARGE = 256, 16 * 1024, 8 * 2**20
"""Bytes of the collectives that are timed. By the largest nothing lies in the fast caches any more."""
_LARGE_SECONDS = 0.02
"""What the largest collective should take, by the rate of the middle one: on slow networks it is a smaller one."""

_TRIAL = (1024, 1024)
"""Shape of the tensor whose steps are timed: gradient, u, v and result take 16 MiB together."""
_WARM_STEPS, _STEPS = 4, 12
_SHIFT = 4096
_FEW, _MORE = 2, 4
"""Numbers of ranks that are tried; what a further rank's message costs to read is the difference."""


# -- the network -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """Seconds by bytes: straight between what was measured, and beyond it as between the last two."""

    points: tuple[tuple[int, float], ...]
    """(bytes, seconds), ascending by bytes."""

    def seconds(self, nbytes: int) -> float:
        """What ``nbytes`` cost."""
        sizes, times = zip(*self.points, strict=True)
        if nbytes > sizes[-1] and len(sizes) > 1:
            rate = max(0.0, times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
            return float(times[-1] + rate * (nbytes - sizes[-1]))
        return float(np.interp(nbytes, sizes, times))


@dataclass(frozen=True)
class Network:
    """What an allgather of so many bytes from each rank costs, and an allreduce of so many."""

    gather: Line
    reduce: Line


def measure_network(transport: Transport, clock: Clock = time.perf_counter) -> Network:
    """Time collectives of three sizes. Collective, and the same result on all ranks: sizes and times are the slowest's.

    Args:
        transport: connects the ranks; nothing else uses it meanwhile.
        clock: seconds, of any origin.

    Raises:
        TransportError: a collective failed.
    """
    middle = max(_SMALL, _MIDDLE // transport.size)
    first = _slowest(transport, _SMALL, _SMALL, clock)
    second = _slowest(transport, middle, _MIDDLE, clock)
    large = _larger(middle, second[0], _LARGE // transport.size), _larger(_MIDDLE, second[1], _LARGE)
    third = _slowest(transport, *large, clock)
    return Network(
        _line([(_SMALL, first[0]), (middle, second[0]), (large[0], third[0])]),
        _line([(_SMALL, first[1]), (_MIDDLE, second[1]), (large[1], third[1])]),
    )


def _slowest(transport: Transport, message: int, total: int, clock: Clock) -> tuple[float, float]:
    """Seconds of an allgather and of an allreduce on the slowest rank."""
    gathered, out = np.zeros(message, np.uint8), np.zeros((transport.size, message), np.uint8)
    summed = np.zeros(total // 4, np.float32)
    times = np.array(
        [
            _median(lambda: transport.allgather(gathered, out), clock),
            _median(lambda: transport.allreduce(summed, "sum"), clock),
        ]
    )
    transport.allreduce(times, "max")
    return float(times[0]), float(times[1])


def _larger(nbytes: int, seconds: float, most: int) -> int:
    """A power of two of bytes that take _LARGE_SECONDS at this rate; at least twice as many."""
    fitting = min(most, nbytes * _LARGE_SECONDS / max(seconds, 1e-9))
    return max(2 * nbytes, 1 << max(1, int(fitting)).bit_length() - 1)


def _line(points: list[tuple[int, float]]) -> Line:
    """Equal sizes (on many ranks) count once; no more bytes take less time."""
    line: dict[int, float] = {}
    for nbytes, seconds in points:
        line[nbytes] = max(seconds, *line.values()) if line else seconds
    return Line(tuple(line.items()))


def _median(collective: Callable[[], None], clock: Clock) -> float:
    collective()
    times = []
    for _ in range(_REPETITIONS):
        start = clock()
        collective()
        times.append(clock() - start)
    return sorted(times)[_REPETITIONS // 2]


# -- compressing -------------------------------------------------------------------------------------------------


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


def measure_cost(sparsity: float, ranks: int) -> Cost:
    """Time steps of one tensor, which take turns so that what else runs hits them all. Local: no communication."""
    sparse, dense = _config(sparsity), _config(sparsity, exclude=("*",))
    with contextlib.ExitStack() as trials:
        kinds = ((sparse, _FEW), (sparse, _MORE), (dense, _FEW))
        made = [trials.enter_context(contextlib.closing(_Trial(*kind))) for kind in kinds]
        best = [math.inf] * len(made)
        for i in range(_WARM_STEPS + _STEPS):
            for number, trial in enumerate(made):
                seconds = trial.step()
                if i >= _WARM_STEPS:  # before that pages are touched, and thresholds settle
                    best[number] = min(best[number], seconds)
    few, more, plain = best
    for_each = max(0.0, more - few) / (_MORE - _FEW)
    return Cost(max(few + (ranks - _FEW) * for_each, 0.0) / math.prod(_TRIAL), plain / math.prod(_TRIAL))


def _config(sparsity: float, **options: Any) -> DGCConfig:
    return DGCConfig(momentum=0.9, nesterov=False, weight_decay=0.0, sparsity=(sparsity,), **options)


class _Trial:
    """Steps of one tensor."""

    def __init__(self, config: DGCConfig, ranks: int) -> None:
        layout = make_layout([Parameter("trial", _TRIAL, "float32")], config)
        self._exchange = Exchange(layout, config, Echo(ranks), choose_kernels("cpu"))
        self._exchange.defers = not config.exclude
        self._numel, self._steps = layout.numel, 0
        last = _SHIFT * (_WARM_STEPS + _STEPS)
        self._values = np.random.default_rng(0).standard_normal(layout.numel + last, np.float32)
        self._parameter, self._result = np.zeros(layout.numel, np.float32), np.zeros(layout.numel, np.float32)

    def step(self) -> float:
        """Seconds of a step."""
        # Another gradient in each step, as in training: one and the same would make residuals grow steadily.
        gradient = self._values[_SHIFT * self._steps :][: self._numel]
        self._steps += 1
        start = time.perf_counter()
        self._exchange.submit(0, gradient, self._result, self._parameter)
        self._exchange.finish()
        if not self._exchange.deferred():
            np.subtract(self._parameter, self._result, out=self._parameter)  # what the optimizer does with it
        return time.perf_counter() - start

    def close(self) -> None:
        """End the exchange."""
        self._exchange.close()


# -- the prediction ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """Seconds of the exchange and of momentum in one step, past the ramp-up."""

    dense: float
    half: float
    sparse: float

    def advice(self, sparsity: float) -> str:
        """What to set; dense unless something saves a tenth."""
        least = min(self.half, self.sparse)
        if self.dense <= 1.1 * least:
            return "stay dense: no compression is faster here"
        if least == self.half:
            return "compression=hvd.Compression.fp16, or DDP's fp16_compress_hook"
        return f"compression=dgc.Compression.dgc(sparsity={sparsity:g})"


def predict(transport: Transport, shapes: Shapes, sparsity: float) -> Prediction:
    """Measure network and compressing. Collective, and the same on all ranks.

    Args:
        transport: connects the ranks, at least two.
        shapes: of the model's tensors.
        sparsity: share of entries held back.

    Raises:
        DGCError: a collective failed, or a rank could not measure.
    """
    costs = np.zeros(2)

    def work() -> dict[str, Any]:
        found = measure_cost(sparsity, transport.size)
        costs[:] = found.sparse, found.dense
        return {}

    agree_or_raise(transport, work, "measurements")
    network = measure_network(transport)
    transport.allreduce(costs, "max")
    return foresee(network, Cost(float(costs[0]), float(costs[1])), transport.size, shapes, sparsity)


def foresee(network: Network, cost: Cost, ranks: int, shapes: Shapes, sparsity: float) -> Prediction:
    """What follows from measurements, bucket by bucket. Local: no communication."""
    config = _config(sparsity)
    layout = make_layout([Parameter(f"{i}", tuple(shape), "float32") for i, shape in enumerate(shapes)], config)
    made = make_encoders(layout, config, choose_kernels("cpu"), Echo(ranks))
    dense = half = sparse = 0.0
    for bucket, (encoder, _) in zip(layout.buckets, made, strict=True):
        n, plan = bucket.size, encoder.plan_at(1.0 - sparsity)
        dense += network.reduce.seconds(4 * n) + cost.dense * n
        half += network.reduce.seconds(2 * n) + cost.dense * n
        summed = network.reduce.seconds(plan.vector_size * plan.itemsize) if plan.allreduces else 0.0
        rest = n - bucket.sparse_size
        sparse += network.gather.seconds(plan.message_bytes) + summed
        sparse += cost.sparse * bucket.sparse_size + cost.dense * rest
    return Prediction(dense, half, sparse)


# -- the command -------------------------------------------------------------------------------------------------


def shapes_of(model: str) -> Shapes:
    """Shapes of the parameters of a model that a function without arguments makes.

    Args:
        model: "module:function"; what it returns has ``named_parameters()``.

    Raises:
        ConfigError: it cannot be imported or made.
    """
    module, _, name = model.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module), name)()
        return [tuple(parameter.shape) for _, parameter in made.named_parameters()]
    except Exception as error:
        raise ConfigError(f"--model {model}: {type(error).__name__}: {error}; give module:function") from error


def run(arguments: argparse.Namespace, connect: Callable[[], Transport]) -> int:
    """Predict, and write the result on rank 0; 1 with one line where that is not possible.

    Args:
        arguments: ``parameters``, ``model``, ``sparsity``.
        connect: makes the job's transport.
    """
    try:
        if not arguments.model and arguments.parameters < 1:
            raise ConfigError(f"--parameters is {arguments.parameters}; allowed: a number of parameters >= 1")
        rows = max(1, arguments.parameters // _MATRIX)
        shapes = (
            shapes_of(arguments.model)
            if arguments.model
            else [(min(_MATRIX, rows - i), _MATRIX) for i in range(0, rows, _MATRIX)]
        )
        transport = connect()
        if transport.size < 2:
            raise ConfigError(f"one process exchanges nothing; {LAUNCH}")
        hosts = len(set(gather_values(transport, socket.gethostname())))
        found = predict(transport, shapes, arguments.sparsity)
    except Exception as error:
        sys.stderr.write(f"error: {str(error).splitlines()[0]}\n")
        return 1
    if transport.rank == 0:
        n = sum(math.prod(shape) for shape in shapes)
        on = "one host" if hosts == 1 else f"{hosts} hosts"
        ranks = f"{transport.size} ranks on {on} over {transport.name}"
        lines = [f"{ranks}, {n:,} parameters; exchange and momentum of a step:"]
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
