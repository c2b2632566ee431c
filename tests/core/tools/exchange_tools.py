"""Shared by the exchange tests: N ranks as threads, and the algorithm written down once more, naively, as an oracle."""

from dataclasses import dataclass, field

import numpy as np
from fake_device import device

from dgc.core.compressors import make_config
from dgc.core.config import Schedule, entries_to_send
from dgc.core.exchange.exchange import Exchange
from dgc.core.exchange.step import AS_BUILT
from dgc.core.kernels.reference import ReferenceKernels, top_k
from dgc.core.layout import Parameter, make_layout, sent_dense
from dgc.errors import DGCError
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


def first_gradients(rank):
    """One rank's gradients of step 0, of the usual parameters."""
    return [gradient(0, rank, i, p.numel) for i, p in enumerate(parameters())]


def run_step(exchange, gradients, params=None, *, order=None, limit=None, options=AS_BUILT):
    """One step: submit every gradient, finish; returns (refused, results)."""
    results = [np.full(g.size, 7, np.float64 if g.dtype == np.float64 else np.float32) for g in gradients]
    exchange.begin(options)
    for i in order if order is not None else reversed(range(len(gradients))):
        exchange.submit(i, gradients[i], results[i], None if params is None else params[i], limit)
    return exchange.finish(), results


def same_results(expected, found):
    """The same values, by step and parameter."""
    for a, b in zip(expected, found, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


def train(ranks, steps, *, shapes=None, lr=0.1, seed=0, dtype="float32", on_step=None, timeout=300, **options):
    """Run ``steps`` steps of ``p -= lr * result`` on all ranks; returns per rank (parameters, exchange)."""
    specs = parameters(shapes, dtype)

    def one_rank(transport):
        exchange = make_exchange(transport, shapes, dtype=dtype, **options)
        rng = np.random.default_rng(1)
        params = [rng.standard_normal(p.numel).astype(dtype) for p in specs]
        for step in range(steps):
            grads = [gradient(step, transport.rank, i, p.numel, dtype, seed) for i, p in enumerate(specs)]
            _, results = run_step(exchange, grads, params)
            for p, r in zip(params, results, strict=True):
                p -= r.dtype.type(lr) * r
            if on_step:
                on_step(transport.rank, step, exchange, params, results)
        exchange.close()
        return params, exchange

    return run_ranks(ranks, one_rank, timeout=timeout)


def dense_sgd(
    ranks, steps, *, shapes=None, lr=0.1, seed=0, momentum=0.0, nesterov=False, weight_decay=0.0, op="average"
):
    """torch.optim.SGD on averaged (or summed) gradients, in float64."""
    specs = parameters(shapes)
    rng = np.random.default_rng(1)
    params = [rng.standard_normal(p.numel).astype("float32").astype(np.float64) for p in specs]
    buffers = [np.zeros(p.numel) for p in specs]
    for step in range(steps):
        for i, p in enumerate(specs):
            g = sum(gradient(step, r, i, p.numel, seed=seed).astype(np.float64) for r in range(ranks))
            g = g / ranks if op == "average" else g
            g = g + weight_decay * params[i]
            buffers[i] = momentum * buffers[i] + g
            update = g + momentum * buffers[i] if nesterov else buffers[i]
            params[i] -= lr * update
    return params


@dataclass
class Oracle:
    """DGC as the paper and Paddle write it (Nesterov u as m * velocity), tensor by tensor, all ranks in one loop."""

    ranks: int
    options: dict
    shapes: dict = field(default_factory=lambda: SHAPES)

    def train(self, steps, lr=0.1, seed=0):
        config = make_config({"min_numel": 64, "values": "float32", **self.options})
        schedule = Schedule(config.sparsity, config.rampup_begin_step, config.rampup_step)
        specs = parameters(self.shapes)
        m, wd = config.momentum or 0.0, config.weight_decay or 0.0
        rng = np.random.default_rng(1)
        params = [rng.standard_normal(p.numel).astype("float32") for p in specs]
        u = [[np.zeros(p.numel, np.float32) for p in specs] for _ in range(self.ranks)]
        v = [[np.zeros(p.numel, np.float32) for p in specs] for _ in range(self.ranks)]
        f = np.float32
        for step in range(steps):
            dense_step = step < schedule.begin
            for i, p in enumerate(specs):
                grads = [gradient(step, r, i, p.numel, seed=seed) for r in range(self.ranks)]
                if dense_step or sent_dense(p, config):
                    g = sum(grads) / f(self.ranks) + f(wd) * params[i]
                    for r in range(self.ranks):
                        u[r][i] = f(m) * u[r][i] + g
                    result = g + f(m) * u[0][i] if config.nesterov else u[0][i]
                    params[i] = params[i] - f(lr) * result
                    continue
                if step == config.rampup_begin_step and config.nesterov:
                    for r in range(self.ranks):
                        u[r][i] = u[r][i] * f(m)
                total = np.zeros(p.numel, np.float32)
                for r in range(self.ranks):
                    g = grads[r]
                    if config.local_grad_clip_norm is not None:
                        norm = np.linalg.norm(g.astype(np.float64))
                        g = g * f(min(1.0, config.local_grad_clip_norm * self.ranks**0.5 / norm))
                    g = g + f(wd) * params[i]
                    if config.nesterov:
                        u[r][i] = f(m) * (u[r][i] + g)
                        v[r][i] += u[r][i] + g
                    else:
                        u[r][i] = f(m) * u[r][i] + g
                        v[r][i] += u[r][i]
                    chosen = top_k(v[r][i], entries_to_send(p.numel, schedule.density(step)))
                    total[chosen] += v[r][i][chosen]
                    v[r][i][chosen] = 0
                    if config.masks:
                        u[r][i][chosen] = 0
                params[i] = params[i] - f(lr) * (total / f(self.ranks))
        return params


def worst(actual, expected):
    """Largest difference of any tensor, relative to that tensor's largest entry."""
    return max(np.abs(a - e).max() / np.abs(e).max() for a, e in zip(actual, expected, strict=True))


def errors_of(ranks, function):
    """Run on all ranks; returns each rank's error."""

    def guarded(transport):
        try:
            function(transport)
        except DGCError as error:
            return error
        return None

    return run_ranks(ranks, guarded)
