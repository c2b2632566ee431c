"""Shared by the exchange tests: N ranks as threads, and what training without the package would give."""

import numpy as np
from fake_device import device
from paddle_oracle import PaddleOracle

from dgc.core.compressors import make_config
from dgc.core.exchange.exchange import Exchange
from dgc.core.exchange.step import AS_BUILT
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.layout import Parameter, make_layout
from dgc.errors import DGCError
from dgc.transport.hierarchical import HierarchicalTransport
from dgc.transport.local import run_ranks

SHAPES = {
    "conv.weight": (8, 4, 3, 3),
    "conv.bias": (8,),
    "fc.weight": (33, 40),
    "fc.bias": (33,),
    "head.weight": (5, 7),
}


def parameters(shapes=None, dtype="float32"):
    return [Parameter(n, tuple(s), dtype) for n, s in (shapes or SHAPES).items()]


class DeviceExchange(Exchange):
    """Takes arrays of the host as those of a fake device."""

    def submit(self, index, gradient, result, parameter=None, limit=None, ready=None):
        there = None if parameter is None else device(parameter)
        super().submit(index, device(gradient), device(result), there, limit, ready)


def make_exchange(transport, shapes=None, *, algorithm="dgc", dtype="float32", kernels=None, loss_scale=1.0, **options):
    exact = {"values": "float32", "small": "float32"} if algorithm == "dgc" else {}
    config = make_config({"min_numel": 64, **exact, **options}, algorithm=algorithm)
    layout = make_layout(parameters(shapes, dtype), config)
    kernels = kernels or ReferenceKernels()
    make = DeviceExchange if kernels.on_device else Exchange
    return make(layout, config, transport, kernels, loss_scale=loss_scale)


def gradient(step, rank, index, numel, dtype="float32", seed=0):
    rng = np.random.default_rng([seed, step, rank, index])
    return (rng.standard_normal(numel) * 0.1).astype(dtype)


def gradients(step, rank, shapes=None, dtype="float32", seed=0):
    """One rank's gradients of a step."""
    return [gradient(step, rank, i, p.numel, dtype, seed) for i, p in enumerate(parameters(shapes, dtype))]


def on_ranks(ranks, function, shapes=None, nodes=None, **options):
    """Call ``function(exchange, rank)`` on each rank with an exchange of its own; returns what each rank returned."""

    def one_rank(transport):
        over = transport if nodes is None else HierarchicalTransport(transport, nodes)
        exchange = make_exchange(over, shapes, **options)
        found = function(exchange, transport.rank)
        exchange.close()
        return found

    return run_ranks(ranks, one_rank)


def run_step(exchange, gradients, params=None, *, order=None, limit=None, options=AS_BUILT):
    """One step: submit every gradient, finish; returns (refused, results)."""
    results = [np.full(g.size, 7, np.float64 if g.dtype == np.float64 else np.float32) for g in gradients]
    exchange.begin(options)
    for i in order if order is not None else reversed(range(len(gradients))):
        exchange.submit(i, gradients[i], results[i], None if params is None else params[i], limit)
    return exchange.finish(), results


def same_results(expected, found):
    """The same bits, by step and parameter."""
    for a, b in zip(expected, found, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)
            assert x.tobytes() == y.tobytes()


def train(ranks, steps, *, shapes=None, lr=0.1, seed=0, dtype="float32", on_step=None, timeout=300, **options):
    """Run ``steps`` steps of ``p -= lr * result`` on all ranks; returns per rank (parameters, exchange)."""
    specs = parameters(shapes, dtype)

    def one_rank(transport):
        exchange = make_exchange(transport, shapes, dtype=dtype, **options)
        rng = np.random.default_rng(1)
        params = [rng.standard_normal(p.numel).astype(dtype) for p in specs]
        for step in range(steps):
            _, results = run_step(exchange, gradients(step, transport.rank, shapes, dtype, seed), params)
            for p, r in zip(params, results, strict=True):
                p -= r.dtype.type(lr) * r
            if on_step:
                on_step(transport.rank, step, exchange, params, results)
        exchange.close()
        return params, exchange

    return run_ranks(ranks, one_rank, timeout=timeout)


def paper(ranks, options, steps):
    """The trained parameters by :class:`PaddleOracle`, which is DGC as the paper and Paddle write it, in NumPy.

    Before ``rampup_begin_step``, that is SGD with the mean of the ranks' gradients.
    """
    config, specs = make_config(options), parameters()
    rng = np.random.default_rng(1)
    oracle = PaddleOracle(
        [rng.standard_normal(p.numel) for p in specs],
        ranks,
        lr=0.1,
        momentum=config.momentum,
        begin=config.rampup_begin_step,
        rampup_step=config.rampup_step,
        sparsity=config.sparsities,
        nesterov=config.nesterov,
        clip=config.local_grad_clip_norm,
        l2=[config.weight_decay or 0.0] * len(specs),
        min_numel=64,
        masking=config.masks,
    )
    for step in range(steps):
        oracle.step([gradients(step, rank) for rank in range(ranks)])
    return oracle.parameters


def worst(actual, expected):
    """Largest difference of any tensor, relative to that tensor's largest entry."""
    return max(np.abs(a - e).max() / np.abs(e).max() for a, e in zip(actual, expected, strict=True))


def errors_of(ranks, function, shapes=None, **options):
    """As :func:`on_ranks`, but returns each rank's error, or None."""

    def guarded(exchange, rank):
        try:
            function(exchange, rank)
        except DGCError as error:
            return error
        return None

    return on_ranks(ranks, guarded, shapes, **options)
