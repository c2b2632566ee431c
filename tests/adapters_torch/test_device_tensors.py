"""Tensors on a device through the whole engine, with a stand-in for the device; and when the host is chosen."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_device import FakeDevice, host, needs_compiler

from dgc.core.compressors import make_config
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.kernels.device import DeviceKernels
from dgc.errors import ConfigError, DGCError
from dgc.torch import engine as engine_module
from dgc.torch import tensors as tensors_module
from dgc.torch.engine import Engine
from dgc.torch.tensors import DeviceTensors, HostTensors, Ready, Recorded, as_array, tensors_for
from dgc.transport.local import run_ranks


class Streams:
    """In place of torch's streams: counts what is recorded."""

    device = torch.device("cpu")

    def __init__(self):
        self.recorded = 0
        self.kept = []
        self.captures = False

    def ready(self):
        return Ready(77, self._record)

    def _record(self):
        self.recorded += 1
        return Recorded(SimpleNamespace(cuda_event=self.recorded))

    def current(self):
        return 77

    def capturing(self):
        return self.captures

    def keep_for(self, tensor, stream):
        self.kept.append((tensor.data_ptr(), stream))

    def allocate(self, nbytes, stream):
        raise NotImplementedError

    free = None


def on_stand_in(parameters, algorithm=None):
    return DeviceTensors(DeviceKernels(FakeDevice()), Streams())


def on_host(parameters, algorithm=None):
    tensors = HostTensors()
    tensors.kernels = NumbaKernels(1)
    return tensors


def train(choose, monkeypatch, dtype, steps=4, algorithm="dgc", **options):
    """A small model on two ranks; returns rank 0's parameters and what the engine used."""
    monkeypatch.setattr(engine_module, "tensors_for", choose)
    common = {"sparsity": 0.99, "momentum": 0.9} if algorithm == "dgc" else {}
    config = make_config({"min_numel": 64, **common, **options}, algorithm=algorithm)

    def one_rank(transport):
        generator = torch.Generator().manual_seed(0)
        shapes = {"a": (90, 100), "b": (90,), "c": (40, 45)}
        parameters = {n: torch.randn(s, generator=generator).to(dtype).requires_grad_() for n, s in shapes.items()}
        engine = Engine(list(parameters.items()), config, transport, optimizer=None)
        generator.manual_seed(transport.rank + 1)
        for _ in range(steps):
            for i, p in reversed(list(enumerate(parameters.values()))):
                gradient = (torch.randn(p.shape, generator=generator) * 0.1).to(dtype)
                if i == 2:
                    gradient = gradient.t().contiguous().t()  # strided
                p.grad = gradient
                p.grad = engine.submit(i, gradient)
            engine.finish()
            with torch.no_grad():
                for p in parameters.values():
                    p -= 0.1 * p.grad
        state = engine.state_dict(own=True)
        used = engine._tensors
        used.buckets = engine.layout.buckets
        engine.close()
        return [p.detach().clone() for p in parameters.values()], state, used

    return run_ranks(2, one_rank)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"weight_decay": 0.01, "nesterov": True}, {"rampup_begin_step": 2}, {"algorithm": "topk"},
    ],
    ids=str,
)  # fmt: skip
def test_training_on_a_device_equals_the_host(dtype, options, monkeypatch):
    got = train(on_stand_in, monkeypatch, dtype, **options)
    wanted = train(on_host, monkeypatch, dtype, **options)
    for (parameters, state, used), (expected, s, _) in zip(got, wanted, strict=True):
        torch.testing.assert_close(parameters, expected, rtol=0, atol=0)
        for name, entry in s["parameters"].items():
            np.testing.assert_array_equal(state["parameters"][name]["u"], entry["u"])
        runtime = used.kernels.device
        # Every bucket is waited for once, and the framework's stream waits once for each step's results.
        assert len(runtime.waited_for) == 4 * len(used.buckets)
        assert sorted(runtime.waited_for) == list(range(1, used._streams.recorded + 1))
        assert runtime.released_to == [77] * 4


@needs_compiler
def test_no_copy_where_the_memory_allows():
    tensors = on_stand_in([])
    x = torch.arange(12.0).view(3, 4)
    assert tensors.array(x).data.ptr == x.data_ptr()
    assert tensors.result(x).array.data.ptr == x.data_ptr()
    copied = tensors.array(x.t())  # it keeps the copy's memory
    assert copied.data.ptr != x.data_ptr()
    np.testing.assert_array_equal(host(copied), x.t().reshape(-1))
    half = x.bfloat16()
    assert tensors.array(half).data.ptr == half.data_ptr()
    assert tensors.array(half).dtype == np.uint16
    place = tensors.result(half)
    assert place.array.dtype == np.float32
    assert place.limit == torch.finfo(torch.bfloat16).max
    place.place.fill_(3)
    place.deliver()
    assert (half == 3).all()
    assert tensors.array(torch.empty(0)).size == 0


class OnGPU:
    """All that the choice looks at."""

    def __init__(self, device):
        self.device = torch.device(device)


def test_a_gpu_without_kernels_falls_back_with_one_warning(monkeypatch):
    def refuse(device):
        if device == "cpu":
            return NumbaKernels(1)
        raise ConfigError(f"no kernels for {device} in this test")

    monkeypatch.setattr(tensors_module, "choose_kernels", refuse)
    tensors_module.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="pass through host memory: no kernels for gpu:1 in this test"):
        assert isinstance(tensors_for([OnGPU("cuda:1"), OnGPU("cuda:1")]), HostTensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(tensors_for([OnGPU("cuda:1")]), HostTensors)
    with pytest.warns(RuntimeWarning, match="cpu, cuda:0, not all on one GPU"):
        assert isinstance(tensors_for([OnGPU("cuda:0"), OnGPU("cpu")]), HostTensors)


def test_a_gpu_with_kernels_is_used(monkeypatch):
    kernels = SimpleNamespace(device=SimpleNamespace(allocate_with=lambda allocate, free: None))
    monkeypatch.setattr(tensors_module, "choose_kernels", lambda device: kernels if device == "gpu:2" else None)
    chosen = tensors_for([OnGPU("cuda:2"), OnGPU("cuda:2")])
    assert isinstance(chosen, DeviceTensors)
    assert chosen.kernels is kernels


@needs_compiler
def test_scratch_is_not_handed_out_again_while_the_kernels_use_it():
    """What is copied or made here belongs to the framework's stream, and the kernels' stream works on it."""
    tensors = on_stand_in([])
    kept, stream = tensors._streams.kept, tensors.kernels.device.stream
    x = torch.arange(12.0).view(3, 4)
    tensors.array(x), tensors.result(x)
    assert kept == [], "memory of the caller's"
    copied = tensors.array(x.t())
    place = tensors.result(x.half())
    assert kept == [(copied.data.ptr, stream), (place.place.data_ptr(), stream)]
    tensors.result(x.t())
    assert len(kept) == 3


@needs_compiler
@pytest.mark.parametrize("capturing", [[0], [0, 1]])
def test_no_rank_exchanges_while_one_captures_a_graph(capturing, monkeypatch):
    """An error on every rank, in the same step; and the engine works again after a reset."""
    monkeypatch.setattr(engine_module, "tensors_for", on_stand_in)
    config = make_config({"min_numel": 64, "sparsity": 0.99})

    def one_rank(transport):
        p = torch.zeros(50, 50, requires_grad=True)
        engine = Engine([("p", p)], config, transport, optimizer=None)
        engine.submit(0, torch.ones(50, 50))
        engine.finish()
        tensors = engine._tensors
        tensors._streams.captures = transport.rank in capturing
        before = list(tensors.kernels.device.released_to)

        def step():
            engine.submit(0, torch.ones(50, 50))
            engine.finish()

        with pytest.raises(DGCError, match="CUDA graph") as raised:
            step()
        if transport.rank in capturing:
            assert isinstance(raised.value, ConfigError)
            assert tensors.kernels.device.released_to == before, "nothing may be enqueued while a graph is captured"
        tensors._streams.captures = False
        engine.reset()
        step()
        engine.close()

    run_ranks(2, one_rank)


def test_a_compressor_that_works_on_the_host_says_so_once(monkeypatch):
    monkeypatch.setattr(tensors_module, "choose_kernels", lambda device: NumbaKernels(1))
    tensors_module.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="'qsgd' works there.* dgc, and topk .* work on the GPU"):
        assert isinstance(tensors_for([OnGPU("cuda:1")], "qsgd"), HostTensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(tensors_for([OnGPU("cuda:1")], "qsgd"), HostTensors)
        for algorithm in (None, "qsgd"):
            assert isinstance(tensors_for([torch.zeros(3)], algorithm), HostTensors)


class SaysItIsOnGPU(torch.Tensor):
    is_cuda, is_cpu = True, False


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_what_passes_through_the_host_is_staged_in_page_locked_memory(dtype, monkeypatch):
    staged = []

    def staging(n, kind):
        staged.append(torch.zeros(n, dtype=kind))
        return staged[-1]

    monkeypatch.setattr(tensors_module, "staging", staging)
    x = torch.arange(12.0).view(3, 4).to(dtype)
    on_gpu = x.as_subclass(SaysItIsOnGPU)
    array, result = as_array(on_gpu.t()), HostTensors().result(on_gpu)
    np.testing.assert_array_equal(array, x.t().reshape(-1).float())
    assert [s.data_ptr() for s in staged] == [array.ctypes.data, result.array.ctypes.data]
    result.array[:] = 5
    result.deliver()
    assert (x == 5).all()
    as_array(x), HostTensors().result(x)
    assert len(staged) == 2, "tensors on the host are not staged"
