"""``python -m dgc bench``: what the exchange of a step costs in this job, dense, in 16 bits and with DGC.

n = elements of the model. Times are those of the slowest rank, of an exchange that nothing hides.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dgc.adapter.speed.choice import Choice
from dgc.core.config import DGCConfig
from dgc.core.layout import Parameter, make_layout
from dgc.core.transport import Transport
from dgc.errors import ConfigError

Shapes: TypeAlias = Sequence[tuple[int, ...]]
MATRIX = 1024
"""Columns of the tensors that stand for a number of parameters."""


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
    config = DGCConfig(momentum=0.9, nesterov=False, weight_decay=0.0, sparsity=(sparsity,), exchange="auto")
    choice = Choice(config)
    choice.measure(transport, entries_alone=True)
    network = choice.network
    assert network is not None, "ranks are several, and tensors are not clipped"
    layout = make_layout([Parameter(f"{i}", tuple(shape), "float32") for i, shape in enumerate(shapes)], config)
    buckets = choice.describe([choice.placed(layout)])["buckets"]
    dense = sparse = half = 0.0
    for bucket in buckets:
        n = bucket["elements"]
        if bucket["dense_ms"] is None:  # small tensors alone: as they are in all three ways
            own = network.reduce.seconds(4 * n)
            dense, half, sparse = dense + own, half + own, sparse + own
            continue
        dense += bucket["dense_ms"] / 1e3
        half += bucket["dense_ms"] / 1e3 - network.reduce.seconds(4 * n) + network.reduce.seconds(2 * n)
        sparse += bucket["sparse_ms"] / 1e3
    return Prediction(dense, half, sparse)


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
        rows = max(1, arguments.parameters // MATRIX)
        shapes = (
            shapes_of(arguments.model)
            if arguments.model
            else [(min(MATRIX, rows - i), MATRIX) for i in range(0, rows, MATRIX)]
        )
        transport = connect()
        if transport.size < 2:
            raise ConfigError(
                "one process exchanges nothing: horovodrun -np 2 python -m dgc bench, or torchrun -m dgc bench"
            )
        found = predict(transport, shapes, arguments.sparsity)
    except Exception as error:
        sys.stderr.write(f"error: {str(error).splitlines()[0]}\n")
        return 1
    if transport.rank == 0:
        n = sum(Parameter("", tuple(shape), "float32").numel for shape in shapes)
        lines = [f"{transport.size} ranks over {transport.name}, {n:,} parameters; exchange and momentum of a step:"]
        ways = (
            ("dense float32", found.dense),
            ("16 bits", found.half),
            (f"DGC, {1 - arguments.sparsity:.1%}", found.sparse),
        )
        lines += [f"  {way:<16}{1e3 * seconds:10.1f} ms" for way, seconds in ways]
        sys.stdout.write("\n".join([*lines, f"  set: {found.advice(arguments.sparsity)}", ""]))
    transport.close()
    return 0
