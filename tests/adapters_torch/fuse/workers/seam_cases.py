"""Cases of a fused Horovod optimizer on real ranks: beside it runs the same optimizer, stepped plainly."""

import warnings
from contextlib import nullcontext

import horovod.torch as hvd
import torch
from torch import nn
from worker_tools import case, run_cases

import dgc.torch as dgc
from dgc.errors import ConfigError
from dgc.torch.fuse import fuse_optimizer, fuse_step, is_fused_optimizer

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
}
PARAMETERS = 6


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))


def named(model, prefix):
    return [(f"{prefix}.{key}", p) for key, p in model.named_parameters()]


def make_optimizer(model, name, prefix, **options):
    cls, settings = OPTIMIZERS[name]
    return hvd.DistributedOptimizer(cls(model.parameters(), **settings), named(model, prefix), **options)


def loss_of(model, step):
    draw = torch.Generator().manual_seed(100 * step + RANK)
    x = torch.randn(8, 7, generator=draw)
    return (model(x) ** 2).mean() * (1 + RANK)


def assert_ranks_agree(model):
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    gathered = hvd.allgather(flat.unsqueeze(0), name="check")
    assert all(torch.equal(row, gathered[0]) for row in gathered)


def assert_equal(plain, fused):
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), fused.parameters(), strict=True))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), fused.parameters(), strict=True))


def compare(make, *, passes=1, clear=True, clip=None, fused=lambda optimizer: PARAMETERS):
    """Train twins whose optimizers ``make(model, prefix)`` builds, and return the fused one.

    Args:
        make: builds an optimizer.
        passes: backward passes per step.
        clear: whether gradients are dropped before a step; if not, they keep their memory.
        clip: largest norm of the averaged gradients.
        fused: how many parameters are stepped as one.
    """
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
        assert_equal(plain_model, model)
        if step != 3:
            assert (optimizer._dgc_fuse.fused_sets, optimizer._dgc_fuse.fused_params) == (1, fused(optimizer))
    assert_ranks_agree(model)
    return optimizer


def compare_horovods(name, passes=1, clear=True, clip=None, **options):
    compare(lambda model, prefix: make_optimizer(model, name, prefix, **options), passes=passes, clear=clear, clip=clip)


@case
def sgd_and_adam_equal_the_plain_step():
    for name in OPTIMIZERS:
        compare_horovods(name)


@case
def compression_moves_the_gradients_and_the_step_follows():
    # decompress makes a new tensor, and Horovod calls p.grad.set_() on the very tensor that fuse_step handed out.
    for name in OPTIMIZERS:
        compare_horovods(name, compression=hvd.Compression.fp16)


@case
def gradients_that_are_kept_and_moved():
    """The handed-out gradient tensors live on and are re-pointed by Horovod every step."""
    compare_horovods("sgd", clear=False, compression=hvd.Compression.fp16)


@case
def clipping_between_synchronize_and_the_step():
    compare_horovods("sgd", clip=1e-2)


@case
def grouped_allreduce():
    compare_horovods("sgd", groups=2)


@case
def several_backward_passes_per_step():
    compare_horovods("sgd", passes=2, backward_passes_per_step=2)


@case
def gradients_are_exchanged_once_a_step():
    model = make_model()
    optimizer = fuse_optimizer(make_optimizer(model, "sgd", "once"))
    calls = []
    synchronize = optimizer.synchronize
    optimizer.synchronize = lambda: (calls.append("synchronize"), synchronize())
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    loss_of(model, 0).backward()
    fuse_step(optimizer)
    assert calls == ["synchronize", "hook"]


@case
def a_second_exchange_is_warned_of():
    model = make_model()
    optimizer = fuse_optimizer(make_optimizer(model, "sgd", "twice"))
    loss_of(model, 0).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.fuse_step()
    assert any("skip_synchronize" in str(w.message) for w in caught)


@case
def a_closure_is_averaged_over_the_ranks():
    model, reference = make_model(), make_model()
    optimizer = fuse_optimizer(make_optimizer(model, "sgd", "closure"))
    plain = make_optimizer(reference, "sgd", "closure.plain")
    calls = []
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            calls.append(loss)
            return loss

        assert optimizer.fuse_step(closure) is calls[-1]
        plain.zero_grad()
        loss_of(reference, step).backward()
        plain.step()
        assert_equal(reference, model)
    assert len(calls) == 3
    assert_ranks_agree(model)


@case
def fusing_before_wrapping_leaves_flat_weights_to_fuse_again():
    model = make_model()
    inner = fuse_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    places = [p.data_ptr() for p in model.parameters()]
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    assert not is_fused_optimizer(optimizer)
    fuse_optimizer(optimizer)
    assert [p.data_ptr() for p in model.parameters()] == places
    loss_of(model, 0).backward()
    optimizer.fuse_step()
    assert optimizer._dgc_fuse.fused_params == PARAMETERS
    assert_ranks_agree(model)


@case
def broadcast_weights_and_state():
    model = make_model()
    optimizer = fuse_optimizer(make_optimizer(model, "adam", "broadcast"))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(RANK)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert_ranks_agree(model)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.fuse_step()
        assert optimizer._dgc_fuse.fused_params == PARAMETERS
    assert_ranks_agree(model)


@case
def with_compressed_gradients():
    def make(model, prefix):
        return dgc.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
            named(model, prefix),
            compression=dgc.Compression.dgc(sparsity=0.9, min_numel=16, sparse_updates=False),
        )

    compare(make)


@case
def with_compressed_gradients_through_horovods_own_argument():
    def make(model, prefix):
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        options = dict(sparsity=0.9, min_numel=16, sparse_updates=False)  # gradients are compared
        compression = dgc.Compression.dgc(named(model, prefix), optimizer=inner, **options)
        return hvd.DistributedOptimizer(inner, named(model, prefix), compression=compression)

    compare(make)


def sharded(bucket_view):
    def make(model, prefix):
        inner = dgc.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=bucket_view
        )
        return hvd.DistributedOptimizer(inner, named(model, prefix))

    return make


@case
def with_sharded_state():
    own = lambda optimizer: len(optimizer.optim.param_groups[0]["params"])  # noqa: E731
    compare(sharded(False), fused=own)
    assert compare(sharded(True), fused=own)._views.intact()


@case("2ranks")
def adasum_is_refused():
    model = make_model()
    adasum = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), op=hvd.Adasum
    )
    message = None
    try:
        fuse_optimizer(adasum)
    except ConfigError as error:
        message = str(error)
    assert message is not None
    assert "Adasum" in message
    assert not is_fused_optimizer(adasum)


if __name__ == "__main__":
    run_cases()
