"""What a step asks of a device's driver, counted for a whole model: each operation costs microseconds of a core."""

import collections
from types import SimpleNamespace

import numpy as np
import pytest
from host_runtime import HostRuntime
from model_shapes import resnet50_shapes

from dgc.adapter.bench import Echo
from dgc.core.compressors import make_config
from dgc.core.exchange.exchange import Exchange
from dgc.core.kernels.gpu.backend import DeviceKernels
from dgc.core.layout import Parameter, make_layout

RANKS = 8
STEPS = 4


class Idle(HostRuntime):
    """Counts what it is asked for and does none of it: memory stays zero, so nothing is found and nothing fails."""

    def empty(self, n, dtype):
        return np.zeros(n, dtype)  # which takes no memory until it is written

    def _enqueue(self, work):
        return


def operations_of_a_step(options, limit=None, algorithm="dgc"):
    """Operations by name, and host waits, of a step whose gradients are all there before the first bucket begins."""
    common = {"sparsity": 0.999, "momentum": 0.9} if algorithm == "dgc" else {}
    config = make_config({**common, **options}, algorithm=algorithm)
    layout = make_layout([Parameter(n, s, "float32") for n, s in resnet50_shapes()], config)
    runtime = Idle()
    exchange = Exchange(layout, config, Echo(RANKS), DeviceKernels(runtime))
    pipeline, state = exchange._pipeline, exchange.latest

    def wait(step, index):
        with state.lock:
            state.lock.wait_for(lambda: not any(step.submissions.missing) or state.closed)
            return not state.closed

    pipeline._wait_for_gradients = wait
    gradients = [runtime.zeros(p.numel, np.float32) for p in layout.parameters]
    parameters = [runtime.zeros(p.numel, np.float32) for p in layout.parameters]
    ready = SimpleNamespace(stream=1, record=lambda: SimpleNamespace(handle=1))
    for _ in range(STEPS):
        runtime.operations.clear()
        for i in reversed(range(len(gradients))):
            exchange.submit(i, gradients[i], gradients[i], parameters[i], limit, ready)
        assert not exchange.finish()
        runtime.release_to(1)  # as the adapter does
    exchange.close()
    return collections.Counter(runtime.operations), len(layout.buckets)


@pytest.mark.parametrize(
    ("options", "limit", "most", "waits"),
    [
        ({}, None, 60, 1),
        ({"weight_decay": 1e-4, "nesterov": True}, None, 60, 1),
        ({"small": "float32", "values": "float32", "indices": "int32"}, None, 60, 1),
        ({"local_grad_clip_norm": 1.0}, None, 64, 2),
        ({}, 65504.0, 66, 2),
    ],
    ids=str,
)
def test_operations_of_resnet50_on_eight_ranks(options, limit, most, waits):
    """Five buckets. With a launch for each step of a search and for each rank it was 205, and 161 events besides."""
    operations, buckets = operations_of_a_step(options, limit)
    assert buckets == 5
    assert operations["wait"] == waits
    assert operations["sweep"] == operations["choose"] == operations["send"] == operations["receive"] == buckets
    assert operations["wait for an event"] == buckets
    assert operations.total() <= most, operations


@pytest.mark.parametrize(
    ("algorithm", "most", "waits"), [("onebit", 150, 5), ("qsgd", 120, 4), ("terngrad", 135, 5), ("dorefa", 135, 5)]
)
def test_operations_of_codes(algorithm, most, waits):
    """They wait for each bucket, several times: beside every element's code on the wire that is little."""
    operations, buckets = operations_of_a_step({}, algorithm=algorithm)
    assert operations["wait"] == waits * buckets
    assert operations["encode"] == buckets
    assert operations.total() <= most, operations
