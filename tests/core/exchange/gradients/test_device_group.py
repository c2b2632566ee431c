"""Sums of a node on its devices: what they ask of the device, when they are left to host memory, who hears of it."""

import gc
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from device_exchange_tools import SHAPES, assert_equal, device_kernels, run
from exchange_tools import errors_of, gradient, make_exchange, parameters, run_step
from host_runtime import HostRuntime, compiler

from dgc.core.exchange.gradients import device_group
from dgc.core.exchange.gradients.device_group import join_devices
from dgc.core.kernels.cpu.backend import NumbaKernels
from dgc.core.kernels.gpu.backend import DeviceKernels
from dgc.errors import DGCError
from dgc.transport.hierarchical import HierarchicalTransport
from dgc.transport.local import run_ranks

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) for the kernels' text")

PAIRS = [0, 0, 2, 2]
OPTIONS = {"sparsity": 0.99, "momentum": 0.9, "bucket_bytes": 1000}


class Faulty(HostRuntime):
    """Connects in vain."""

    def __init__(self, fault):
        super().__init__(groups=True)
        self.fault = fault
        self.place = 77 if fault == "place" else None

    def new_group(self):
        if self.fault == "new":
            raise TypeError("another version of it")
        return super().new_group()

    def join(self, group, rank, size):
        if self.fault == "join":
            raise RuntimeError("no way between them")
        joined = super().join(group, rank, size)
        if self.fault == "sum" and rank == 1:
            add_up = joined.add_up

            def wrong(array):
                add_up(array)
                array += 1

            joined.add_up = wrong
        return joined


@pytest.mark.parametrize("fault", ["none", "missing", "new", "place", "join", "sum", "memory"])
def test_devices_add_up_only_where_all_of_them_can(fault, caplog):
    def runtime(rank):
        return HostRuntime(groups=rank != 1) if fault == "missing" else Faulty(fault)

    def rank(transport):
        kernels = DeviceKernels(runtime(transport.rank))
        if fault == "memory" and transport.rank == 1:
            kernels.memory.zeros = no_room
        group = join_devices(kernels, transport)
        assert (kernels.runtime in device_group._in_use) == (group is not None)
        if group is not None:
            group.close()
            assert kernels.runtime not in device_group._in_use
        return group is not None

    with caplog.at_level(logging.WARNING, "dgc"):
        assert run_ranks(3, rank) == [fault == "none"] * 3
    why = {
        "missing": "no NCCL here",
        "new": "another version of it",
        "place": "several ranks of the node share a GPU",
        "join": "no way between them",
        "sum": "a first sum came out wrong",
        "memory": "no room",
    }
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == {"none": 0, "join": 3}.get(fault, 1)
    assert set(said) <= {f"gradients are added up within a node in host memory, not by NCCL: {why.get(fault)}"}


def no_room(*_):
    raise MemoryError("no room")


def test_of_two_compressors_on_a_device_one_adds_up_there(caplog):
    """Each has a thread: their sums would come in another order on another rank, and both wait for ever."""

    def rank(transport, runtimes):
        kernels = DeviceKernels(runtimes[transport.rank])
        first = join_devices(kernels, transport)
        second = join_devices(kernels, transport)
        first.close()
        third = join_devices(kernels, transport)
        found = [group is not None for group in (first, second, third)]
        del third  # without being closed
        gc.collect()
        transport.allreduce(np.zeros(1))
        return [*found, join_devices(kernels, transport) is not None]

    runtimes = [HostRuntime(groups=True) for _ in range(2)]
    with caplog.at_level(logging.WARNING, "dgc"):
        assert run_ranks(2, rank, runtimes) == [[True, False, True, True]] * 2
    assert all("another compressor of this process does so already" in r.getMessage() for r in caplog.records)
    assert len(caplog.records) == 2


def test_a_device_alone_needs_nobody():
    def rank(transport):
        group, values = join_devices(device_kernels(), transport), np.arange(3)
        group.add_up(values)
        return group is not None and values.tolist()

    assert run_ranks(1, rank) == [[0, 1, 2]]


@pytest.mark.parametrize("fault", ["missing", "sum"])
def test_a_job_goes_on_in_host_memory(fault):
    def kernels():
        return device_kernels() if fault == "missing" else DeviceKernels(Faulty(fault))

    options = {**OPTIONS, "nodes": PAIRS}
    assert_equal(run(kernels, 4, 4, **options), run(lambda: NumbaKernels(1), 4, 4, **options))


def test_gradients_stay_on_the_device():
    """From the second step on: nothing but tables, what came and dense means cross, and the host waits for messages."""

    def rank(transport, groups):
        kernels = device_kernels(groups=groups)
        exchange = make_exchange(HierarchicalTransport(transport, PAIRS), SHAPES, kernels=kernels, **OPTIONS)
        grads = [gradient(0, transport.rank, i, p.numel) for i, p in enumerate(exchange.layout.parameters)]
        kept = [run_step(exchange, grads)]
        kernels.wait()
        before, waits = len(kernels.runtime.operations), kernels.runtime.waits
        kept.append(run_step(exchange, grads))
        operations, buckets = kernels.runtime.operations[before:], len(exchange.layout.buckets)
        waited = kernels.runtime.waits - waits
        kernels.wait()  # what is enqueued knows memory by address
        exchange.close()
        return operations, waited, buckets

    for operations, waits, buckets in run_ranks(4, lambda transport: rank(transport, True)):
        assert operations.count("add up") == buckets > 1
        assert operations.count("download") == 0
        assert waits <= buckets + 1  # for each message, and for the results
    by_host, waits, buckets = run_ranks(4, lambda transport: rank(transport, False))[0]
    assert by_host.count("download") == len(SHAPES)
    assert waits > 2 * buckets


def test_a_first_step_that_failed_leaves_nothing_behind():
    """The others have collected their gradients of all buckets in host memory, and are not connected yet."""

    def rank(transport):
        kernels = device_kernels(groups=True)
        exchange = make_exchange(
            HierarchicalTransport(transport, PAIRS), SHAPES, kernels=kernels, clip_scope="global",
            local_grad_clip_norm=100.0, **OPTIONS,
        )  # fmt: skip
        grads = [gradient(0, transport.rank, i, p.numel) for i, p in enumerate(exchange.layout.parameters)]
        if transport.rank == 1:
            exchange._pipeline._nodes.collect = lambda step, bucket: (_ for _ in ()).throw(MemoryError("no room"))
        others = [g * 3 for g in grads]
        with pytest.raises(DGCError, match="no room"):
            run_step(exchange, others)
        kernels.wait()
        if transport.rank == 1:
            del exchange._pipeline._nodes.collect
        exchange.reset()
        _, first = run_step(exchange, grads)
        _, second = run_step(exchange, grads)
        kernels.wait()
        exchange.close()
        return first, second

    def on_cpu(transport):
        exchange = make_exchange(
            HierarchicalTransport(transport, PAIRS), SHAPES, kernels=NumbaKernels(1), clip_scope="global",
            local_grad_clip_norm=100.0, **OPTIONS,
        )  # fmt: skip
        grads = [gradient(0, transport.rank, i, p.numel) for i, p in enumerate(exchange.layout.parameters)]
        steps = [run_step(exchange, grads)[1] for _ in range(2)]
        exchange.close()
        return steps

    for mine, theirs in zip(run_ranks(4, rank), run_ranks(4, on_cpu), strict=True):
        for results, expected in zip(mine, theirs, strict=True):
            for a, b in zip(results, expected, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_narrow_gradients_are_added_up_in_float32(kind):
    import ml_dtypes

    narrow = np.float16 if kind == "float16" else ml_dtypes.bfloat16

    def rank(transport, kernels):
        exchange = make_exchange(HierarchicalTransport(transport, PAIRS), SHAPES, kernels=kernels, **OPTIONS)
        specs, steps = parameters(SHAPES), []
        for step in range(3):
            grads = [gradient(step, transport.rank, i, p.numel).astype(narrow) for i, p in enumerate(specs)]
            grads = [g.view(np.uint16) if kind == "bfloat16" else g for g in grads]
            results = [np.zeros(g.size, np.float32) for g in grads]
            for i, g in enumerate(grads):
                exchange.submit(i, g, results[i])
            exchange.finish()
            if isinstance(kernels, DeviceKernels):
                kernels.wait()
            steps.append(results)
        exchange.close()
        return steps

    got = run_ranks(4, lambda transport: rank(transport, device_kernels(groups=True)))
    wanted = run_ranks(4, lambda transport: rank(transport, NumbaKernels(1)))
    for mine, theirs in zip(got, wanted, strict=True):
        for results, expected in zip(mine, theirs, strict=True):
            for a, b in zip(results, expected, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_rank_that_cannot_collect_leaves_nobody_in_the_sum(failing):
    kept = []  # what is enqueued knows memory by address

    def rank(transport):
        exchange = make_exchange(
            HierarchicalTransport(transport, PAIRS), SHAPES, kernels=device_kernels(groups=True), **OPTIONS
        )
        grads = [gradient(0, transport.rank, i, p.numel) for i, p in enumerate(exchange.layout.parameters)]
        kept.append((exchange, grads, run_step(exchange, grads)))
        exchange._kernels.wait()
        if transport.rank == failing:
            exchange._kernels.gather = lambda *_: (_ for _ in ()).throw(MemoryError("no room"))
        run_step(exchange, grads)

    errors = errors_of(4, rank)
    assert all(isinstance(e, DGCError) and "MemoryError: no room" in str(e) for e in errors), errors


def test_gradients_are_gathered_when_they_are_there():
    """The kernels' stream waits for the event behind each bucket's gradients before it reads them."""

    def rank(transport):
        kernels = device_kernels(groups=True)
        exchange = make_exchange(HierarchicalTransport(transport, PAIRS), SHAPES, kernels=kernels, **OPTIONS)
        grads = [gradient(0, transport.rank, i, p.numel) for i, p in enumerate(exchange.layout.parameters)]
        results = [np.zeros_like(g) for g in grads]
        ready = SimpleNamespace(stream=1, record=lambda: SimpleNamespace(handle=1))
        for _ in range(2):
            kernels.runtime.operations.clear()
            for i in reversed(range(len(grads))):
                exchange.submit(i, grads[i], results[i], ready=ready)
            exchange.finish()
        kernels.wait()
        assert kernels.runtime in device_group._in_use
        exchange.close()
        assert kernels.runtime not in device_group._in_use
        return kernels.runtime.operations, len(exchange.layout.buckets)

    for operations, buckets in run_ranks(4, rank):
        events = [i for i, name in enumerate(operations) if name == "wait for an event"]
        gathered = [i for i, name in enumerate(operations) if name == "pack"]
        sums = [i for i, name in enumerate(operations) if name == "add up"]
        assert len(events) >= len(sums) == buckets
        for number, at in enumerate(sums):
            before = [i for i in gathered if i < at]
            assert sum(i < before[-1] for i in events) > number, operations


def test_a_rank_without_room_for_the_vector_says_so_before_the_sum():
    """In the first step gradients are collected in host memory: the vector on the device is made then, too."""

    def rank(transport):
        kernels = device_kernels(groups=True)
        exchange = make_exchange(HierarchicalTransport(transport, PAIRS), SHAPES, kernels=kernels, **OPTIONS)
        if transport.rank == 1:
            exchange._pipeline._nodes._vector_of = no_room
        grads = [gradient(0, transport.rank, i, p.numel) for i, p in enumerate(exchange.layout.parameters)]
        run_step(exchange, grads)

    errors = errors_of(4, rank)
    assert all(isinstance(e, DGCError) and "MemoryError: no room" in str(e) for e in errors), errors
