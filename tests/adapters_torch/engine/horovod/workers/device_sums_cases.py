"""Large sums by copies on a device, on real ranks: the device is the processor, and a sum is MPI's or Gloo's."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from worker_tools import SkipCase, case, run_cases

from dgc.core.codecs import plan
from dgc.core.kernels.gpu.backend import DeviceKernels
from dgc.errors import TransportError
from dgc.torch import Compression, DistributedOptimizer
from dgc.torch.engine import engine as engine_module
from dgc.torch.engine.device_tensors import DeviceTensors
from dgc.torch.engine.horovod import device_sums
from dgc.torch.engine.horovod.choice import make_transport
from dgc.torch.engine.horovod.device_sums import SummedOnDevices
from dgc.torch.engine.horovod.horovod import gather_values, member_set

sys.path.append(str(Path(__file__).resolve().parents[4] / "core" / "tools"))
from host_runtime import HostRuntime, compiler

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
HERE = torch.device("cpu")
# So that a small model has a tensor that is large, and in no message.
LARGE = device_sums.LARGE = plan.INLINE_MAX_BYTES = 80_000


@contextlib.contextmanager
def nccl(built=True):
    """As if Horovod had NCCL; yields the names of the sums that go to Horovod."""
    names, before, reduce = [], hvd.nccl_built, hvd.allreduce_async_

    def counted(tensor, name=None, **options):
        names.append(name)
        return reduce(tensor, name=name, **options)

    hvd.nccl_built, hvd.allreduce_async_ = lambda: built, counted
    try:
        yield names
    finally:
        hvd.nccl_built, hvd.allreduce_async_ = before, reduce


@contextlib.contextmanager
def transport_on(device, choice="auto"):
    """A transport that has been told of this rank's device, and the names of its sums by Horovod."""
    with nccl() as names:
        transport = make_transport(choice)
        assert isinstance(transport, SummedOnDevices)
        transport.use(device)
        del names[:]
        yield transport, names
        transport.close()


def values(n, dtype="float32"):
    return np.random.default_rng((n, RANK)).standard_normal(n).astype(dtype)


def by_devices(names):
    return [name for name in names if ".sums." in name]


@case
def without_nccl_the_transport_is_horovods_or_mpis():
    assert not hvd.nccl_built()
    transport = make_transport()
    assert not isinstance(transport, SummedOnDevices)
    transport.close()


@case
def large_sums_are_those_of_the_transport():
    for dtype in ("float32", "float64"):
        n = LARGE // np.dtype(dtype).itemsize
        plain = make_transport()
        wanted, got = values(n, dtype), values(n, dtype)
        plain.allreduce(wanted)
        with transport_on(HERE) as (transport, names):
            transport.allreduce(got)
            assert len(by_devices(names)) == 1, names
        plain.close()
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
        if SIZE == 2:
            np.testing.assert_array_equal(got, wanted)  # a + b is b + a
        assert len(set(gather_values(got.tobytes().hex()[:200] + str(got.sum()), "test.same", member_set()))) == 1


@case
def everything_else_stays_with_the_transport():
    with transport_on(HERE) as (transport, names):
        small, large, out = values(100), np.abs(values(LARGE // 4)), np.empty((SIZE, 3), np.uint8)
        largest = large.copy()
        transport.allreduce(small)
        transport.allreduce(largest, "max")
        transport.allgather(np.full(3, RANK, np.uint8), out)
        assert by_devices(names) == []
        np.testing.assert_array_equal(out, np.repeat(np.arange(SIZE), 3).reshape(SIZE, 3))
        assert (largest >= large).all()
        assert (transport.rank, transport.size) == (RANK, SIZE)
        assert (transport.divisible is not None) == (transport.name == "mpi")
        assert not hasattr(transport, "nonsense")


@case
def a_rank_on_the_host_keeps_all_of_them_there():
    with transport_on(HERE if RANK else None) as (transport, names):
        array = values(LARGE // 4)
        transport.allreduce(array)
        assert by_devices(names) == []


@contextlib.contextmanager
def heard_of():
    """What the log "dgc" is told."""
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("dgc").addHandler(handler)
    try:
        yield heard
    finally:
        logging.getLogger("dgc").removeHandler(handler)


@case
def sums_that_horovod_calls_done_too_early_are_not_made_on_devices():
    for name in ("HOROVOD_ENABLE_ASYNC_COMPLETION", "HOROVOD_ENABLE_XLA_OPS"):
        for value, refused in (("1", True), ("0", False)):
            if RANK == 1:
                os.environ[name] = value
            with heard_of() as heard, transport_on(HERE) as (transport, names):
                transport.allreduce(values(LARGE // 4))
                assert len(by_devices(names)) == (not refused)
                assert [f"{name} is set" in text for text in heard] == [True] * (refused and RANK == 1), heard
            os.environ.pop(name, None)


@case
def a_rank_whose_device_has_no_room_leaves_nobody_in_the_first_sum():
    zeros = torch.zeros

    def none(*arguments, **options):
        raise RuntimeError("CUDA out of memory")

    device_sums.torch.zeros = none if RANK == 1 else zeros
    try:
        with heard_of() as heard, transport_on(HERE) as (transport, names):
            transport.allreduce(values(LARGE // 4))
            assert by_devices(names) == []
            assert ["out of memory" in text for text in heard] == [True] * (RANK == 1)
    finally:
        device_sums.torch.zeros = zeros


@case
def a_first_sum_that_comes_out_wrong_on_one_rank_is_the_last_one():
    synchronize = hvd.synchronize

    def spoiled(handle):
        result = synchronize(handle)
        return result.add_(1) if RANK == 1 and result.dtype == torch.float64 else result

    hvd.synchronize = spoiled
    try:
        with heard_of() as heard, transport_on(HERE) as (transport, names):
            hvd.synchronize = synchronize
            array = values(LARGE // 4)
            transport.allreduce(array)
            assert by_devices(names) == []
    finally:
        hvd.synchronize = synchronize
    told = [text for text in heard if "NCCL cannot be used here" in text]
    assert len(told) == (RANK == 1), heard


@case
def a_failed_sum_is_named():
    with transport_on(HERE) as (transport, _):

        def fails(*_, **__):
            raise RuntimeError("the network is gone")

        before, hvd.allreduce_async_ = hvd.allreduce_async_, fails
        try:
            with pytest.raises(TransportError, match=r"dgc\.sums.*float32.* failed: the network is gone"):
                transport.allreduce(values(LARGE // 4))
        finally:
            hvd.allreduce_async_ = before


@case
def a_closed_one_sums_no_more():
    with transport_on(HERE) as (transport, names):
        transport.close()
        with pytest.raises(TransportError, match="closed"):
            transport.allreduce(values(LARGE // 4))
        assert by_devices(names) == []


def trained(on_devices, steps=4, **options):
    """A model with a tensor of 90 kB whose first steps are dense; returns its parameters, and Horovod's sums."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(150, 150), torch.nn.ReLU(), torch.nn.Linear(150, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    before = engine_module.tensors_for
    engine_module.tensors_for = lambda parameters, algorithm=None: stand_in()
    try:
        with nccl(on_devices) as names:
            compression = Compression.dgc(**{"sparsity": 0.99, "rampup_begin_step": 2, **options})
            wrapped = DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            for step in range(steps):
                generator = torch.Generator().manual_seed(100 * step + RANK)
                wrapped.zero_grad()
                loss = model(torch.randn(8, 150, generator=generator)).square().mean()
                loss.backward()
                wrapped.step()
            compression.close()
    finally:
        engine_module.tensors_for = before
    return [p.detach().clone() for p in model.parameters()], by_devices(names)


def stand_in():
    class Streams:
        device = HERE

        def __getattr__(self, name):
            return lambda *arguments: {"capturing": False, "current": 77}.get(name)

    return DeviceTensors(DeviceKernels(HostRuntime(seed=3)), Streams())


def both(**options):
    if compiler() is None:
        raise SkipCase("no C++ compiler (g++) for the kernels' text")
    (got, names), (wanted, none) = trained(True, **options), trained(False, **options)
    assert none == []
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0 if SIZE == 2 else 1e-6)
    return names


@case
def dense_steps_are_summed_on_devices():
    """Two dense steps, and the probe."""
    assert len(both()) == 2 + 1


@case
def large_dense_tensors_are_summed_on_devices_in_every_step():
    assert len(both(exclude=["0.weight"], rampup_begin_step=0)) == 4 + 1


@case
def nothing_large_is_summed_where_everything_is_sparse():
    assert len(both(rampup_begin_step=0)) == 1


@case("mpirun")
def a_sum_of_nodes_stays_with_the_transport():
    assert len(both(hierarchical=2)) == 1


run_cases()
