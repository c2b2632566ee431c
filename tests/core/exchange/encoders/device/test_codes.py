"""Compressors of few bits on a device against the same on a CPU: the device's own kernels, run by a processor."""

import numpy as np
import pytest
from device_exchange_tools import assert_equal, device_kernels, one_step, run
from exchange_tools import make_exchange
from host_runtime import compiler
from rank_jobs import once

from dgc.core.compressors import quantizers as codes
from dgc.core.exchange.encoders.device.codes import DeviceCodesEncoder
from dgc.core.kernels.cpu.backend import NumbaKernels
from dgc.core.kernels.gpu.cuda import source
from dgc.errors import DGCError, WireError
from dgc.transport.local import run_ranks

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) for the kernels' text")

# More than a tile, pieces of rows that are not full, a kernel of a convolution; vectors and small ones are sent dense.
SHAPES = {"a.weight": (150, 90), "b.weight": (6, 5, 3, 3), "c.weight": (700,), "d.weight": (7, 5)}

CASES = {
    "onebit": {"algorithm": "onebit", "momentum": 0.9},
    "onebit, rows": {"algorithm": "onebit", "means": "row", "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "onebit, tensor": {"algorithm": "onebit", "means": "tensor", "bucket_bytes": 1000},
    "onebit, no feedback": {"algorithm": "onebit", "error_feedback": False},
    "qsgd": {"algorithm": "qsgd"},
    "qsgd, 2 bits": {"algorithm": "qsgd", "bits": 2, "norm": "max", "bucket_size": 100},
    "qsgd, 8 bits": {"algorithm": "qsgd", "bits": 8, "bucket_size": 3, "op": "sum"},
    "terngrad": {"algorithm": "terngrad", "bucket_bytes": 1000},
    "terngrad, not cut": {"algorithm": "terngrad", "clip_factor": None, "loss_scale": 1024.0},
    "dorefa": {"algorithm": "dorefa"},
    **{f"dorefa, {bits} bits": {"algorithm": "dorefa", "bits": bits} for bits in (1, 3, 5, 8)},
    "dense first": {"algorithm": "qsgd", "rampup_begin_step": 2},
    "vectors, too": {"algorithm": "onebit", "include": ["*"], "min_numel": 0},
}


@pytest.fixture(autouse=True)
def shapes(monkeypatch):
    monkeypatch.setattr("device_exchange_tools.SHAPES", SHAPES)


def numba():
    return NumbaKernels(1)


@pytest.mark.parametrize("ranks", once([3, 1]))
@pytest.mark.parametrize("case", CASES)
def test_equals_the_cpu(case, ranks):
    """Results and residuals, bit for bit."""
    assert_equal(run(device_kernels, ranks, 4, **CASES[case]), run(numba, ranks, 4, **CASES[case]))


@pytest.mark.parametrize("algorithm", ["onebit", "qsgd", "terngrad", "dorefa"])
def test_float64(algorithm):
    options = {"algorithm": algorithm, "dtype": "float64"}
    assert_equal(run(device_kernels, 2, 3, **options), run(numba, 2, 3, **options))


@pytest.mark.parametrize("algorithm", ["onebit", "qsgd", "terngrad", "dorefa"])
def test_a_refused_step_is_taken_back(algorithm):
    options = {"algorithm": algorithm, "spoil": (1, 1, 0)}
    got = run(device_kernels, 2, 4, **options)
    assert got[0][0] == [False, True, False, False]
    assert_equal(got, run(numba, 2, 4, **options))


def test_the_order_of_sums_is_the_same_in_both():
    assert (codes.TILE, codes.ROWS) == (source.TILE, source.ROWS)


def test_what_nobody_applied_returns_as_on_the_cpu():
    def states(kernels_of_rank):
        def one_rank(transport):
            kernels, alive = kernels_of_rank(), []
            exchange = make_exchange(transport, SHAPES, algorithm="onebit", kernels=kernels, momentum=0.9)
            exchange.awaits_update = True
            for step in range(4):
                alive.append(one_step(exchange, step, transport.rank, [None] * len(SHAPES)))
                if step % 2:
                    assert exchange.drop()
            found = exchange.state_dict()
            exchange.close()
            return [False] * 4, [], found, 0.0

        return run_ranks(2, one_rank)

    assert_equal(states(device_kernels), states(numba))


DAMAGE = {
    "a scale": ("qsgd", lambda payload: payload[:4].view(np.float32).fill(np.nan), "no finite number"),
    "a negative scale": ("dorefa", lambda payload: payload[:4].view(np.float32).fill(-1), "no finite number"),
    "a mean": ("onebit", lambda payload: payload[:4].view(np.float32).fill(np.inf), "no finite number"),
    "a level": ("qsgd", lambda payload: payload[4 * 27 :][:1].fill(255), "beyond the largest"),
    "a trit": ("terngrad", lambda payload: payload[4:5].fill(243), "no five ternary numbers"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_message_is_refused_by_its_senders_name(what, monkeypatch):
    algorithm, damage, text = DAMAGE[what]
    whole = DeviceCodesEncoder._encode

    def encode(self, state, spec, info):
        written = whole(self, state, spec, info)
        if self._transport.rank == 1:
            damage(self._own)
        return written

    monkeypatch.setattr(DeviceCodesEncoder, "_encode", encode)

    def one_rank(transport):
        exchange = make_exchange(transport, SHAPES, algorithm=algorithm, kernels=device_kernels())
        with pytest.raises(DGCError, match=text) as caught:
            one_step(exchange, 0, transport.rank, [None] * len(SHAPES))
        exchange.close()
        return isinstance(caught.value, WireError), "rank 1" in str(caught.value)

    assert run_ranks(2, one_rank) == [(True, True)] * 2
