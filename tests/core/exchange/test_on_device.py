"""The exchange on a fake device against the exchange on a CPU: bit for bit, in the device's own order of work."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from exchange_tools import gradients, on_ranks, run_step
from fake_device import FakeDevice, counts, fake_kernels, launched, needs_compiler

from dgc.core.kernels.cpu import NumbaKernels

pytestmark = needs_compiler

# The first one is selected by thresholds, the second one without; the others are sent dense.
SHAPES = {"a.weight": (90, 100), "a.bias": (90,), "b.weight": (40, 40), "c.weight": (7, 5)}
CASES = {
    "default": {"values": "float16", "momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "few bits": {"indices": "elias_fano", "values": "int2", "small": "int3", "momentum": 0.9},
    "no masking": {"values": "int8", "momentum": 0.9, "momentum_masking": False},
    "ramp-up": {"momentum": 0.9, "nesterov": True, "sparsity": [0.9, 0.99], "rampup_begin_step": 2, "rampup_step": 4},
    "dense sum": {"momentum": 0.9, "sparsity": 0.25, "indices": "uint16", "weight_decay": 0.01},
    "dense": {"momentum": 0.9, "rampup_begin_step": 100, "weight_decay": 0.01},
    "clipping": {"momentum": 0.9, "local_grad_clip_norm": 0.5},
    "global clipping": {"momentum": 0.9, "local_grad_clip_norm": 0.5, "clip_scope": "global", "bucket_bytes": 40000},
    "sum": {"momentum": 0.9, "op": "sum", "weight_decay": 0.01},
    "several buckets": {"momentum": 0.9, "bucket_bytes": 1000},
    "large vector": {"momentum": 0.9, "exclude": ["b.*"]},
    "coded": {"momentum": 0.9, "small": "int8", "weight_decay": 0.01, "loss_scale": 64.0},
}


def run(make_kernels, ranks, steps, *, dtype="float32", limit=None, spoil=None, **options):
    """Some steps on all ranks; parameters stay as they are, so that no step needs the one before."""

    def one_rank(exchange, rank):
        assert (exchange.ways() == "dense sum") is ("indices" in options and options["indices"] == "uint16")
        rng = np.random.default_rng(1)
        params = [rng.standard_normal(p.numel).astype(dtype) for p in exchange.layout.parameters]
        done = []
        for step in range(steps):
            given = gradients(step, rank, SHAPES, dtype)
            if spoil is not None and spoil[:2] == (step, rank):
                given[spoil[2]][3] = np.inf
            done.append(run_step(exchange, given, params, limit=limit))
        return done, exchange.state_dict(), exchange.state.residual_norm()

    return on_ranks(ranks, one_rank, SHAPES, dtype=dtype, kernels=make_kernels(), **options)


def on_cpu():
    return NumbaKernels(1)


def assert_equal(got, wanted, same=np.testing.assert_array_equal):
    for (done, state, norm), (expected, s, n) in zip(got, wanted, strict=True):
        assert [refused for refused, _ in done] == [refused for refused, _ in expected]
        for step, ((_, mine), (_, theirs)) in enumerate(zip(done, expected, strict=True)):
            for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                same(a, b, err_msg=f"step {step}, parameter {i}")
        assert state["step"] == s["step"]
        for name, entry in s["parameters"].items():
            for key, value in entry.items():
                same(state["parameters"][name][key], value, err_msg=f"{name} {key}")
        assert norm == pytest.approx(n, rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_cpu(case):
    """Results, u, v and thresholds."""
    options = {"sparsity": 0.99, **CASES[case]}
    got, wanted = (run(make, 3, 6, **options) for make in (fake_kernels, on_cpu))
    if "clipping" not in case:
        assert_equal(got, wanted)
        return

    def close(a, b, err_msg):  # sums of squares are added up in another order
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7, err_msg=err_msg)

    assert_equal(got, wanted, close)


@pytest.mark.parametrize("case", ["default", "nesterov", "ramp-up", "dense", "several buckets"])
def test_ranks_that_send_as_one_equal_the_cpu(case):
    """Sums of a node pass through host memory."""
    options = {"sparsity": 0.99, "nodes": [0, 0, 2], **CASES[case]}
    assert_equal(run(fake_kernels, 3, 6, **options), run(on_cpu, 3, 6, **options))


@pytest.mark.parametrize(("dtype", "limit"), [("float64", None), ("float16", 65504.0), ("float16", 0.001)])
def test_types(dtype, limit):
    """float64 gradients, float16 ones, and results that do not fit (the step is refused on every rank)."""
    options = {"sparsity": 0.99, "momentum": 0.9, "values": "float16"}
    got, wanted = (run(make, 2, 4, dtype=dtype, limit=limit, **options) for make in (fake_kernels, on_cpu))
    assert_equal(got, wanted)
    assert got[0][0][0][0] is (limit == 0.001)


@pytest.mark.parametrize("parameter", [0, 1])
@pytest.mark.parametrize("values", ["float16", "int8"])
def test_a_refused_step_is_taken_back(parameter, values):
    """An infinity in a sparsified or a dense tensor: NaN results where it was, and u and v as on the CPU."""
    options = {"sparsity": 0.99, "momentum": 0.9, "values": values, "bucket_bytes": 30000, "spoil": (2, 1, parameter)}
    got = run(fake_kernels, 2, 5, **options)
    assert [refused for refused, _ in got[0][0]] == [False, False, True, False, False]
    assert np.isnan(got[0][0][2][1][parameter]).all()
    assert_equal(got, run(on_cpu, 2, 5, **options))


def test_state_moves_between_device_and_cpu():
    options = {"sparsity": 0.99, "momentum": 0.9, "values": "float16"}

    def trained(*makers):
        done, saved = [[], []], [None, None]

        def three_steps(exchange, rank):
            if saved[rank] is not None:
                exchange.load_state_dict(saved[rank])
            first = exchange.state.step
            done[rank] += [run_step(exchange, gradients(first + i, rank, SHAPES)) for i in range(3)]
            saved[rank] = exchange.state_dict()
            return done[rank], saved[rank], exchange.state.residual_norm()

        return [on_ranks(2, three_steps, SHAPES, kernels=make(), **options) for make in makers][-1]

    assert_equal(trained(fake_kernels, on_cpu, fake_kernels), trained(on_cpu, on_cpu, on_cpu))


def test_a_step_takes_few_launches_and_copies():
    """However many tensors there are: one pass in, one out, and entries set and masked at once."""

    def steps(exchange, rank):
        for step in range(4):
            counts.clear()
            run_step(exchange, gradients(step, rank, SHAPES))
        return dict(counts), len(exchange.layout.buckets)

    ((found, buckets),) = on_ranks(1, steps, SHAPES, kernels=fake_kernels(), sparsity=0.99, momentum=0.9)
    assert buckets == 1
    assert {name: n for name, n in found.items() if name.startswith("dgc_")} == {
        f"dgc_{name}": 1 for name in ("sweep", "pack", "clear", "place", "update", "take_out")
    }
    assert found["wait"] == 2, "for the candidates, and for the dense tensors, which have come with them"
    assert (found["launch"], found["fill"], found["to host"]) == (9, 3, 3)
    assert found["to device"] <= 6


def test_what_kernels_remember_of_a_layout_is_freed_with_its_exchange(monkeypatch):
    """The kernels serve all compressors of a process."""
    kernels, sent = fake_kernels(), []
    send = FakeDevice.send

    def noted(device, *arrays):
        there = send(device, *arrays)
        sent.extend(weakref.ref(array._memory) for array in there)
        return there

    monkeypatch.setattr(FakeDevice, "send", noted)
    for n in (1000, 2000, 3000):
        shapes = {"a": (n, 3), "b": (n,)}

        def steps(exchange, rank, shapes=shapes):
            for step in range(2):
                run_step(exchange, gradients(step, 0, shapes))
            exchange.state.residual_norm()

        on_ranks(1, steps, shapes, kernels=kernels, sparsity=0.99, momentum=0.9)
    launched.clear()
    gc.collect()
    assert len(sent) > 9
    assert [each() for each in sent if each() is not None] == []


@pytest.mark.parametrize("streams", [1, 2])
def test_gradients_are_waited_for_before_they_are_read(streams):
    """One event for each bucket and stream, recorded when its last gradient is there."""

    class Ready:
        recorded = 0

        def __init__(self, stream):
            self.stream = stream

        def record(self):
            Ready.recorded += 1
            return SimpleNamespace(handle=100 * Ready.recorded + self.stream)

    def step(exchange, rank):
        for i, g in reversed(list(enumerate(gradients(0, 0, SHAPES)))):
            exchange.submit(i, g, np.zeros_like(g), ready=Ready(i % streams))
        exchange.finish()
        return [{s.parameter % streams for s in b.segments} for b in exchange.layout.buckets]

    kernels = fake_kernels()
    (of_bucket,) = on_ranks(1, step, SHAPES, kernels=kernels, sparsity=0.99, bucket_bytes=8000)
    device = kernels.device
    assert len(of_bucket) > 1
    assert [w // 100 for w in device.waited_for] == list(range(1, sum(map(len, of_bucket)) + 1))
    at = 0
    for streams_of in of_bucket:
        assert {w % 100 for w in device.waited_for[at : at + len(streams_of)]} == streams_of
        at += len(streams_of)
    assert device.adopted == 1
