"""What the contract tests share: every registered compressor, some with options, alone and in an exchange."""

import math
from dataclasses import dataclass, field

import exchange_tools
import numpy as np
from documented import documented_compressor, own_names
from exchange_tools import run_step

from dgc.core.compressors import BucketSpec, SparseValues, StepInfo, Tensor, compressor_class, make_config
from dgc.core.exchange.exchange import Exchange
from dgc.core.kernels import choose_kernels
from dgc.core.kernels.threshold import new_thresholds
from dgc.core.layout import make_layout
from dgc.transport.local import run_ranks

SHAPES = {**exchange_tools.SHAPES, "head.weight": (5, 17)}


@dataclass(frozen=True)
class Case:
    """A compressor with options."""

    name: str
    options: dict = field(default_factory=dict)

    @property
    def row(self):
        return compressor_class(self.name)

    def __str__(self):
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.options.items())])


VARIANTS = [
    Case("topk", {"threshold": "global", "sparsity": 0.9}),
    Case("topk", {"sparsity": 0.5, "indices": "elias_fano", "values": "int8"}),
    Case("dgc", {"sparsity": 0.9, "indices": "uint16", "values": "float16"}),
    Case("dgc", {"sparsity": 0.0}),
    Case("dryden", {"sparsity": 0.0}),
    Case("dryden", {"sparsity": 0.8}),
    Case("strom", {"threshold": 0.05, "max_density": 0.2}),
    Case("strom", {"max_density": 1.0}),
    Case("adacomp", {"conv_bin": 10, "fc_bin": 63, "entries_per_bin": 1.5}),
    Case("onebit", {"means": "row"}),
    Case("onebit", {"means": "tensor"}),
    Case("qsgd", {"bits": 2, "norm": "max", "bucket_size": 100}),
    Case("qsgd", {"bits": 8, "bucket_size": 7}),
    Case("terngrad", {"clip_factor": None}),
    Case("dorefa", {"bits": 1}),
    Case("dorefa", {"bits": 3}),
    Case("dorefa", {"bits": 8}),
]

DOCUMENTED = documented_compressor()[1]
CASES = [Case(name) for name in (*own_names(), DOCUMENTED)] + VARIANTS
"""A new row of the registry is tested without a change here."""


def specs(shapes=None, dtype="float32"):
    return exchange_tools.parameters(shapes or SHAPES, dtype)


def make_exchange(transport, case, *, shapes=None, dtype="float32", loss_scale=1.0, **options):
    momentum = {"momentum": 0.0} if case.row.error_feedback else {}  # ``dgc`` would adopt one
    config = make_config({"min_numel": 64, **momentum, **case.options, **options}, algorithm=case.name)
    layout = make_layout(specs(shapes, dtype), config)
    return Exchange(layout, config, transport, choose_kernels("cpu"), loss_scale=loss_scale)


def gradients(step, rank, shapes=None, dtype="float32"):
    return exchange_tools.gradients(step, rank, shapes or SHAPES, dtype)


def on_ranks(ranks, case, function, **options):
    """Call ``function(exchange, rank)`` on each rank with an exchange of its own; returns what each rank returned."""

    def one_rank(transport):
        exchange = make_exchange(transport, case, **options)
        found = function(exchange, transport.rank)
        exchange.close()
        return found

    return run_ranks(ranks, one_rank)


def train(ranks, steps, case, *, shapes=None, dtype="float32", on_step=None, **options):
    """Run steps on all ranks; returns for each rank (results of each step, exchange)."""

    def one_rank(exchange, rank):
        results = []
        for step in range(steps):
            given = gradients(step, rank, shapes, dtype)
            before = snapshot(exchange)
            refused, got = run_step(exchange, given)
            results.append(got)
            if on_step:
                on_step(rank, step, exchange, given, got, before)
            assert not refused
        return results, exchange

    return on_ranks(ranks, case, one_rank, shapes=shapes, dtype=dtype, **options)


def snapshot(exchange):
    """u and v by parameter, copied."""
    state = exchange.state
    indices = range(len(exchange.layout.parameters))
    return [(state.momentum_buffer(i).copy(), state.residual(i).copy()) for i in indices]


class Alone:
    """One compressor on one bucket without an exchange."""

    def __init__(self, case, shapes=None, seed=0):
        config = make_config(
            {"min_numel": 0, "include": "*", "bucket_bytes": 2**30, **case.options}, algorithm=case.name
        )
        layout = make_layout(specs(shapes), config)
        assert len(layout.buckets) == 1
        self.bucket = layout.buckets[0]
        self.tensors = tuple(
            Tensor(layout.parameters[s.parameter].name, layout.parameters[s.parameter].shape, s.offset, s.length)
            for s in self.bucket.sparse
        )
        self.algorithm = case.row(config)
        sparsity = config.sparsities[0]
        self.spec = BucketSpec(self.bucket, self.tensors, 1.0 - sparsity, layout.sparse_numel)
        self.thresholds = new_thresholds(len(self.tensors))
        self.seed = seed

    def flat(self, values):
        """Values by tensor name -> the bucket's flat space."""
        x = np.zeros(self.bucket.sparse_size, np.float32)
        for tensor in self.tensors:
            x[tensor.slice] = np.broadcast_to(np.asarray(values[tensor.name]).reshape(-1), (tensor.n,))
        return x

    def random(self, seed=0):
        rng = np.random.default_rng(seed)
        return self.flat({t.name: rng.standard_normal(t.n) * 0.1 for t in self.tensors})

    def encode(self, x, *, step=0, rank=0, increment=None, shared=None):
        """Returns (message, count, used)."""
        info = StepInfo(step, rank, self.seed, self.thresholds)
        info.increment = x if increment is None else increment
        if self.algorithm.shares:
            info.shared = self.algorithm.prepare(x, self.spec) if shared is None else shared
        out = np.full(self.algorithm.max_bytes(self.spec), 0xAB, np.uint8)
        count, used = self.algorithm.encode(x, out, self.spec, info)
        out[used:] = 0
        return out, count, used

    def sent(self, x, **info):
        """Returns (decoded, count, used) of a message, decoded as the algorithm says it."""
        message, count, used = self.encode(x, **info)
        return self.algorithm.decode(message, count, self.spec), count, used

    def decode(self, message, count):
        """The bucket's flat space as receivers see it."""
        return self.spread(self.algorithm.decode(message, count, self.spec))

    def spread(self, decoded):
        out = np.zeros(self.bucket.sparse_size, np.float64)
        if isinstance(decoded, SparseValues):
            out[decoded.positions] = decoded.values
        else:
            for tensor, values in zip(self.tensors, decoded.values, strict=True):
                out[tensor.slice] = values
        return out

    def roundtrip(self, x, **info):
        message, count, _ = self.encode(x, **info)
        return self.decode(message, count)


def payload_formula(case, shape):
    """Bytes of one tensor's payload by the paper's formula, its means, norms and counts included."""
    n = math.prod(shape)
    config = make_config(dict(case.options), algorithm=case.name)
    own, density = config.own, 1.0 - config.sparsities[0]
    if case.name == DOCUMENTED:
        return n / 8 + 4
    if case.name in ("dgc", "topk"):
        share = density * (own.headroom if own is not None and own.threshold == "global" else 1.0)
        k = int(n * share * (1 + 1e-9))
        values = {"int8": 8, "int2": 2, "float16": 16}[config.value_codec]
        indices = {"uint16": 16, "elias_fano": math.log2(1 / share) + 2}[config.indices]
        return k * (indices + values) / 8
    if case.name == "strom":
        return 4 * int(n * own.max_density)
    if case.name == "dryden":
        return 4 * int(n * density * (1 + 1e-9)) + 8
    if case.name == "adacomp":
        length = own.conv_bin if len(shape) > 2 else own.fc_bin
        return own.entries_per_bin * -(-n // length) * (1 if length < 64 else 2) + 4
    if case.name == "onebit":
        columns = {"column": n // shape[0], "row": shape[0], "tensor": 1}[own.means]
        return n / 8 + 8 * columns
    if case.name == "qsgd":
        return n * own.bits / 8 + 4 * -(-n // own.bucket_size)
    if case.name == "terngrad":
        return n * 1.6 / 8 + 4
    if case.name == "dorefa":
        return n * own.bits / 8 + 4
    raise ValueError(f"{case.name} has no formula yet")
