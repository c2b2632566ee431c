"""Cases of a fused optimizer that averages gradients, on real ranks: beside it runs the same one, stepped plainly."""

from contextlib import nullcontext

import horovod.torch as hvd
import torch
from adapters_torch.workers.tensors import assert_replicas_identical, loss_of, make_model, raises
from torch import nn
from worker_tools import case

import dgc.torch as dgc
from dgc.errors import ConfigError
from dgc.torch import fuse_optimizer, is_fused_optimizer

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
}


def named(model, prefix):
    return [(f"{prefix}.{key}", p) for key, p in model.named_parameters()]


def kernels_seen(model, optimizer):
    """What the update is shown in a step: the flat parameters and the others."""
    seen = []
    cls = next(c for c in type(optimizer).__mro__ if c.__module__.startswith("torch.optim"))
    init = cls._init_group
    cls._init_group = lambda self, group, *args: (seen.append(len(group["params"])), init(self, group, *args))[1]
    try:
        loss_of(model, 0).backward()
        optimizer.fuse_step()
    finally:
        cls._init_group = init
    return sum(seen)


def compare(make, *, passes=1, clear=True, clip=None):
    """Train twins whose optimizers ``make(model, prefix)`` builds; equal after each step, and fused in the end."""
    plain_model, model = make_model(), make_model()
    plain, optimizer = make(plain_model, "plain"), fuse_optimizer(make(model, "fused"))
    for step in range(8):
        for net, opt, update in ((plain_model, plain, plain.step), (model, optimizer, optimizer.fuse_step)):
            opt.zero_grad() if clear else net.zero_grad(set_to_none=False)
            for part in range(passes):
                loss_of(net, 10 * step + part).backward()
            context = nullcontext()
            if clip is not None:
                opt.synchronize()
                nn.utils.clip_grad_norm_(net.parameters(), clip)
                context = opt.skip_synchronize()
            with context:
                opt.step() if step == 3 else update()
        for a, b in zip(plain_model.parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a.grad, b.grad)
    assert_replicas_identical(model.parameters())
    if passes == 1:
        optimizer.zero_grad()
        assert kernels_seen(model, optimizer) == 1


def horovods(name, **options):
    cls, settings = OPTIMIZERS[name]
    return lambda model, prefix: hvd.DistributedOptimizer(
        cls(model.parameters(), **settings), named(model, prefix), **options
    )


@case
def horovods_optimizer_equals_the_plain_step():
    for name in OPTIMIZERS:
        compare(horovods(name))
        # decompress makes a new tensor, and Horovod calls p.grad.set_() on the very tensor that fuse_step handed out.
        compare(horovods(name, compression=hvd.Compression.fp16), clear=False)
    compare(horovods("sgd"), clip=1e-2)
    compare(horovods("sgd", backward_passes_per_step=2), passes=2)


@case
def with_compressed_gradients():
    options = dict(sparsity=0.9, min_numel=16)

    def own(model, prefix):
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        return dgc.DistributedOptimizer(inner, named(model, prefix), compression=dgc.Compression.dgc(**options))

    def stock(model, prefix):
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        compression = dgc.Compression.dgc(named(model, prefix), optimizer=inner, **options)
        return hvd.DistributedOptimizer(inner, named(model, prefix), compression=compression)

    compare(own)
    compare(stock)


@case
def a_closure_is_averaged_over_the_ranks():
    model, reference = make_model(), make_model()
    optimizer = fuse_optimizer(horovods("sgd")(model, "closure"))
    plain = horovods("sgd")(reference, "closure.plain")
    losses = []
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            losses.append(loss)
            return loss

        assert optimizer.fuse_step(closure) is losses[-1]
        plain.zero_grad()
        loss_of(reference, step).backward()
        plain.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    assert len(losses) == 3


@case
def weights_that_were_fused_before_wrapping_are_fused_where_they_are():
    model = make_model()
    inner = fuse_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    places = [p.data_ptr() for p in model.parameters()]
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    assert not is_fused_optimizer(optimizer)
    fuse_optimizer(optimizer)
    assert [p.data_ptr() for p in model.parameters()] == places
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert kernels_seen(model, optimizer) == 1
    assert_replicas_identical(model.parameters())


@case("2ranks")
def adasum_is_refused():
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    adasum = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters(), op=hvd.Adasum)
    raises(ConfigError, "Adasum", lambda: fuse_optimizer(adasum))
    assert not is_fused_optimizer(adasum)
