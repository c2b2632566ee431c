"""Shared by the tests of exchanges on a device: some steps there and on the CPU, and the comparison."""

import numpy as np
import pytest
from exchange_tools import gradient, make_exchange, parameters
from host_runtime import HostRuntime

from dgc.core.kernels.gpu.backend import DeviceKernels
from dgc.transport.hierarchical import HierarchicalTransport
from dgc.transport.local import run_ranks

# The first one is selected by thresholds, the second one without; the others are sent dense.
SHAPES = {"a.weight": (90, 100), "a.bias": (90,), "b.weight": (40, 40), "c.weight": (7, 5)}


def device_kernels(**options):
    return DeviceKernels(HostRuntime(**{"seed": 7, "deferred": True, **options}))


def one_step(exchange, step, rank, params, *, dtype="float32", limit=None, spoil=None):
    """Submit one step's gradients and finish; nothing waits for a device here."""
    grads = [gradient(step, rank, i, p.numel, dtype) for i, p in enumerate(exchange.layout.parameters)]
    if spoil is not None:
        grads[spoil][3] = np.inf
    wide = np.float64 if dtype == "float64" else np.float32
    results = [np.full(g.size, 7, wide) for g in grads]
    for i in reversed(range(len(grads))):
        exchange.submit(i, grads[i], results[i], params[i], limit)
    return exchange.finish(), results, grads


def run(kernels_of_rank, ranks, steps, *, dtype="float32", limit=None, spoil=None, waits=False, nodes=None, **options):
    """Some steps on all ranks; parameters stay as they are, so that no step needs the one before."""
    specs = parameters(SHAPES, dtype)

    def one_rank(transport):
        kernels = kernels_of_rank()
        over = HierarchicalTransport(transport, nodes) if nodes else transport
        exchange = make_exchange(over, SHAPES, dtype=dtype, kernels=kernels, **options)
        rng = np.random.default_rng(1)
        params = [rng.standard_normal(p.numel).astype(dtype) for p in specs]
        refusals, results, kept = [], [], []
        for step in range(steps):
            bad = spoil[2] if spoil is not None and spoil[:2] == (step, transport.rank) else None
            refused, result, gradients = one_step(
                exchange, step, transport.rank, params, dtype=dtype, limit=limit, spoil=bad
            )
            kept.append(gradients)
            refusals.append(refused)
            results.append(result)
            if waits:
                kernels.wait()
        if isinstance(kernels, DeviceKernels):
            kernels.wait()
        state = exchange.state_dict()
        norm = exchange.state.residual_norm()
        exchange.close()
        return refusals, results, state, norm

    return run_ranks(ranks, one_rank)


def assert_equal(got, wanted):
    for (refusals, results, state, norm), (r, expected, s, n) in zip(got, wanted, strict=True):
        assert refusals == r
        for step, (mine, theirs) in enumerate(zip(results, expected, strict=True)):
            for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                np.testing.assert_array_equal(a, b, err_msg=f"step {step}, parameter {i}")
        assert state["step"] == s["step"]
        for name, entry in s["parameters"].items():
            for key, value in entry.items():
                np.testing.assert_array_equal(state["parameters"][name][key], value, err_msg=f"{name} {key}")
        assert norm == pytest.approx(n, rel=1e-5)
