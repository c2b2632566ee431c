"""DDP's communication hook on 2 real ranks under torchrun; Horovod and mpi4py cannot be imported."""

import contextlib
import functools
import os
import sys
import time
import types
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from adapters_torch.torchrun_tools import (
    EXACT,
    Branches,
    assert_close,
    assert_frozen,
    assert_identical,
    digest,
    freezing,
    loss_of,
    make_model,
    on_every_rank,
)
from ddp_tools import LEFT, adamw, dense, hooked, sgd, train
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from worker_tools import case, close_later, warned

import dgc.torch as dgc


def both(steps_of, module=make_model, make_optimizer=sgd, options=None, **ddp):
    """Train by ``steps_of(model, optimizer)`` with the hook and without; they must end alike, on all ranks."""
    model, optimizer, state = hooked(module(), make_optimizer, options, **ddp)
    steps_of(model, optimizer)
    reference = dense(module(), make_optimizer, **ddp)
    steps_of(*reference)
    assert_close(model, reference[0])
    assert_identical(model)
    return state.compression.stats.steps


# -- it equals DDP ---------------------------------------------------------------------------------------------------

VARIANTS = {
    "plain": {},
    "small buckets": {"bucket_cap_mb": 0.004},
    "views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True, "bucket_cap_mb": 0.004},
    "unused": {"find_unused_parameters": True},
}


@case(variant=VARIANTS)
def training_equals_ddp_at_sparsity_0(variant):
    assert both(train, **VARIANTS[variant]) == 20
    assert not [name for name in sys.modules if name.partition(".")[0] in ("horovod", "mpi4py")]


OTHERS = {
    "AdamW": (adamw, EXACT),
    "AdamW without beta1": (functools.partial(adamw, betas=(0.0, 0.99)), EXACT),
    "AdamW before the selection": (adamw, {"sparsity": 0.9, "rampup_begin_step": 20, "error_feedback": "classic"}),
}


@case(optimizer=OTHERS)
def other_optimizers_equal_ddp(optimizer):
    make, options = OTHERS[optimizer]
    both(train, make_optimizer=make, options=options)


def accumulating_and_scheduled_in_each_pass(model, optimizer):
    """The momentum of the update is that of the time of step(), not that of the first of the passes."""
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=50)
    for step in range(20):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with model.no_sync():
            loss_of(model, 2 * step).backward()
        scheduler.step()
        loss_of(model, 2 * step + 1).backward()
        optimizer.step()
        scheduler.step()


def clipping(model, optimizer):
    for step in range(20):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()


def synced_twice(model, optimizer):
    """Without no_sync(), as some scripts accumulate."""
    for step in range(20):
        optimizer.zero_grad()
        loss_of(model, 2 * step).backward()
        loss_of(model, 2 * step + 1).backward()
        optimizer.step()


def probing(model, optimizer, probe):
    """Compute a gradient before each step, in a context that ``probe`` returns, and drop it."""
    for step in range(4):
        with probe():
            loss_of(model, 100 + step).backward()
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


DROPPED = "no step\\(\\) has used them"
KEPT = {
    "in both": ({"sparsity": 0.9}, True),
    "in the residual": ({"sparsity": 0.9, "momentum": 0.0}, True),
    "in the momentum": (EXACT, True),
    "nowhere": ({**EXACT, "momentum": 0.0}, False),
}


@case(where=KEPT)
def a_gradient_that_is_dropped_after_its_exchange_is_told_on_rank_0_if_a_part_is_kept(where):
    options, kept = KEPT[where]
    model, optimizer, _ = hooked(make_model(), options=options, bucket_cap_mb=0.004)
    told = warned(lambda: probing(model, optimizer, contextlib.nullcontext), DROPPED)
    assert told == (kept and dist.get_rank() == 0)


def refused_once(model, optimizer):
    """The gradient stays in the residual, too, but the script was told that the step was refused."""
    train(model, optimizer, 1)
    optimizer.zero_grad()
    (loss_of(model, 1) * float("nan")).backward()
    train(model, optimizer, 1, start=2)


USED = {"added up over two exchanges": (synced_twice, {"momentum": 0.0}), "refused and cleared": (refused_once, {})}


@case(gradient=USED)
def a_gradient_is_not_called_dropped_if_it_is(gradient):
    training, options = USED[gradient]
    model, optimizer, _ = hooked(make_model(), options={"sparsity": 0.9, **options}, bucket_cap_mb=0.004)
    assert not warned(lambda: training(model, optimizer), DROPPED)


@case
def a_gradient_that_is_dropped_inside_no_sync_changes_nothing():
    probed, optimizer, _ = hooked(make_model(), options={"sparsity": 0.9}, bucket_cap_mb=0.004)
    assert not warned(lambda: probing(probed, optimizer, probed.no_sync), DROPPED)
    model, optimizer, _ = hooked(make_model(), options={"sparsity": 0.9}, bucket_cap_mb=0.004)
    train(model, optimizer, 4)
    assert digest(probed) == digest(model)


LOOPS = {
    "accumulating and scheduled in each pass": (accumulating_and_scheduled_in_each_pass, EXACT, 20),
    "clipping": (clipping, LEFT, 20),
    "synced twice": (synced_twice, LEFT, 40),
}


@case(view=(False, True), loop=LOOPS)
def loops_equal_ddp_at_sparsity_0(view, loop):
    steps_of, options, steps = LOOPS[loop]
    assert both(steps_of, options=options, gradient_as_bucket_view=view, bucket_cap_mb=0.004) == steps


@case
def the_optimizer_may_be_bound_later():
    model = DistributedDataParallel(make_model())
    compression = close_later(dgc.Compression.dgc(**EXACT))
    state = dgc.ddp.CompressionState(compression, named_parameters=model.module.named_parameters())
    model.register_comm_hook(state, dgc.ddp.compression_hook)
    optimizer = sgd(model)
    wrapper = types.SimpleNamespace(optimizer=optimizer)  # as Lightning's and Fabric's
    state.bind(wrapper)
    train(model, optimizer)
    reference = dense(make_model())
    train(*reference)
    assert_close(model, reference[0])
    assert set(compression.state_dict(own=True)["parameters"]) == {n for n, _ in model.module.named_parameters()}
    assert compression.describe()["transport"] == "torch.distributed"
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert not optimizer.state


def gloo_threads():
    names = []
    for each in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            names.append(Path(f"/proc/self/task/{each}/comm").read_text())
    return sum("gloo" in name for name in names)


@case
def close_ends_the_threads_of_dgcs_own_group():
    """A thread of Gloo's that needs the interpreter while it ends would abort the process."""
    before = gloo_threads()
    model, optimizer, state = hooked(make_model(), sgd, EXACT)
    train(model, optimizer, 3)
    assert gloo_threads() > before
    state.compression.close()
    deadline = time.monotonic() + 20
    while gloo_threads() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gloo_threads() == before


# -- scaling and clipping --------------------------------------------------------------------------------------------


def new_scaler(enabled=True):
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4, enabled=enabled)


def scaled_and_clipped(model, optimizer, scaler, norm=0.3, broken=False):
    for step in range(10):
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(model, step))
        (loss * float("inf") if broken and step == 3 and dist.get_rank() == 1 else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), norm)
        scaler.step(optimizer)
        scaler.update()


@case(broken=(False, True))
def a_scaler_and_clipping_equal_ddp_until_a_gradient_is_not_finite(broken):
    model, optimizer, state = hooked(make_model(), options={**LEFT, "loss_scale": (scaler := new_scaler())})
    scaled_and_clipped(model, optimizer, scaler, broken=broken)
    reference = dense(make_model())
    scaled_and_clipped(*reference, new_scaler(), broken=broken)
    assert state.compression.stats.refused_steps == broken
    assert_identical(model)
    if not broken:  # what the other rank has computed in the step stays in its residual
        assert_close(model, reference[0])


@case(scales=(False, True), norm=(0.01, 1e9))
def clipping_the_velocity_is_a_warning(scales, norm):
    """Not where the limit is not reached."""
    scaler = new_scaler(enabled=scales)
    model, optimizer, _ = hooked(make_model(), options={**EXACT, "loss_scale": scaler})
    clipped = functools.partial(scaled_and_clipped, model, optimizer, scaler, norm)
    assert warned(clipped, "momentum=0 in the compressor.*local_grad_clip_norm") == (norm < 1 and dist.get_rank() == 0)


# -- parameters ------------------------------------------------------------------------------------------------------

UNUSED = {"find_unused_parameters": True}
FROZEN = {
    "SGD": (sgd, EXACT),
    "SGD that keeps momentum": (sgd, LEFT),
    "AdamW": (lambda m: torch.optim.AdamW(m.parameters()), {**EXACT, "momentum": 0.0}),
}


@case(view=(False, True), optimizer=FROZEN)
def a_frozen_layer_equals_that_of_ddp(view, optimizer):
    make, options = FROZEN[optimizer]
    both(freezing, Branches, make, options, gradient_as_bucket_view=view, **UNUSED)


@case(view=(False, True), momentum=(0.0, 0.9))
def a_frozen_layer_does_not_move_by_a_bit(view, momentum):
    options = {"sparsity": 0.9, "min_numel": 64, **({} if momentum else {"momentum": 0.0, "weight_decay": 0.0})}
    make = lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=momentum)  # noqa: E731
    model, optimizer, state = hooked(Branches(), make, options, gradient_as_bucket_view=view, **UNUSED)
    assert_frozen(model, optimizer, state.compression)


@case
def a_layer_that_was_frozen_at_the_wrapping_cannot_be_unfrozen():
    module = make_model()
    module[0].requires_grad_(False)
    model, optimizer, _ = hooked(module)
    train(model, optimizer, 1)
    module[0].requires_grad_(True)
    match = "wrap the module in a new DistributedDataParallel and register a new compressor after adding or unfreezing"
    on_every_rank(dgc.LayoutError, match, lambda: train(model, optimizer, 1))


def unused_by_one_rank(model, optimizer):
    for step in range(20):
        optimizer.zero_grad()
        loss_of(model, step, (step + dist.get_rank()) % 2 == 0).backward()
        optimizer.step()


def unused_by_all(model, optimizer):
    for step in range(20):
        optimizer.zero_grad(set_to_none=step % 3 == 0)
        loss_of(model, step, step % 2 == 0).backward()
        optimizer.step()


@case(view=(False, True))
def unused_parameters_equal_those_of_ddp(view):
    both(unused_by_one_rank, Branches, gradient_as_bucket_view=view, **UNUSED)
    both(unused_by_all, Branches, gradient_as_bucket_view=view, bucket_cap_mb=0.001, **UNUSED)


class Strided(nn.Module):
    """Weights in the orders in which memory_format=, .t() and attention layers leave them; one is used now and then."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 8, 3)
        self.sometimes = nn.Conv2d(3, 16, 3, padding=1)
        self.turned = nn.Parameter(0.2 * torch.randn(5, 32).t())
        self.gaps = nn.Parameter((0.2 * torch.randn(5, 64))[:, ::2])  # DDP gives it a contiguous place
        self.to(memory_format=torch.channels_last)

    def forward(self, x, sometimes=False):
        x = torch.cat([x, x[:, :7]], 1).view(-1, 3, 3, 3).contiguous(memory_format=torch.channels_last)
        y = self.first(x) + self.sometimes(x) if sometimes else self.first(x)
        y = self.second(torch.tanh(y)).flatten(1)
        y = y.repeat(1, 4)
        return y @ self.turned + torch.tanh(y) @ self.gaps.t()


def with_a_buffer(model):
    optimizer = sgd(model)
    for p in model.parameters():
        generator = torch.Generator().manual_seed(p.numel())
        optimizer.state[p]["momentum_buffer"] = torch.empty_like(p).copy_(
            torch.randn(p.shape, generator=generator) / 20
        )
    return optimizer


STRIDED = {
    "decay": (lambda m: sgd(m, weight_decay=0.05), EXACT),
    "a dense run's momentum": (with_a_buffer, EXACT),
    "momentum stays": (sgd, LEFT),
}


@case(view=(False, True), kind=STRIDED)
def parameters_that_are_not_contiguous_equal_those_of_ddp(view, kind):
    """DDP lays a bucket out in their strides, where GradBucket.gradients() reads it as if it were contiguous."""
    make, options = STRIDED[kind]
    assert not all(p.is_contiguous() for p in Strided().parameters())
    both(unused_by_one_rank, Strided, make, options, gradient_as_bucket_view=view, bucket_cap_mb=0.001, **UNUSED)


@case(to_hook=(False, True))
def states_of_the_hook_and_of_dgcs_optimizer_go_on_in_each_other(to_hook):
    """Of parameters that are not contiguous."""
    options = {"sparsity": 0.9, "min_numel": 64}

    def with_hook(module):
        model, optimizer, state = hooked(module, options=options, **UNUSED)
        return model, optimizer, state.compression

    def with_optimizer(module):
        compression = dgc.Compression.dgc(**options)
        optimizer = dgc.DistributedOptimizer(sgd(module), module.named_parameters(), compression=compression)
        return module, optimizer, compression

    straight, module, saved = Strided(), Strided(), {}
    _, optimizer, compression = with_optimizer(straight)
    unused_by_one_rank(straight, optimizer)
    compression.average(optimizer)
    unused_by_one_rank(straight, optimizer)
    compression.close()
    for make in (with_optimizer, with_hook) if to_hook else (with_hook, with_optimizer):
        model, optimizer, compression = make(module)
        compression.load_state_dict(saved)
        unused_by_one_rank(model, optimizer)
        compression.average(optimizer)
        saved = compression.state_dict()
        compression.close()
    assert_close(module, straight)


@case
def gradients_that_share_memory_equal_those_of_ddp():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(7)
            self.a, self.b = nn.Parameter(torch.randn(20, 5)), nn.Parameter(torch.randn(20, 5))

        def forward(self, x):
            return (x @ (self.a.unsqueeze(0) + self.b.unsqueeze(0))).squeeze(0)

    both(train, Sum, lambda m: sgd(m, weight_decay=0.05))


# -- what is refused -------------------------------------------------------------------------------------------------


def without_clearing(model, optimizer):
    loss_of(model, 0).backward()
    loss_of(model, 1).backward()


def stepping_twice(model, optimizer):
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.step()


def stepping_without_sync(model, optimizer):
    with model.no_sync():
        loss_of(model, 0).backward()
    optimizer.step()


REFUSED = {
    "without_clearing": (without_clearing, r"call optimizer.zero_grad\(\) after each step\(\).*no_sync"),
    "stepping_twice": (stepping_twice, r"again without a backward pass"),
    "stepping_without_sync": (stepping_without_sync, r"inside no_sync\(\)"),
}


@case(view=(False, True), kind=REFUSED)
def gradients_that_are_not_a_new_steps_are_refused(view, kind):
    steps, match = REFUSED[kind]
    model, optimizer, _ = hooked(make_model(), gradient_as_bucket_view=view)
    on_every_rank(dgc.DGCError, match, lambda: steps(model, optimizer))


@case
def bad_input():
    def state_of(*arguments, **options):
        return dgc.ddp.CompressionState(dgc.Compression.dgc(**options), *arguments)

    def refused(match, function, error=dgc.ConfigError):
        on_every_rank(error, match, function)

    model, optimizer, state = hooked(make_model())
    refused("exchanged already", lambda: state_of(optimizer))
    refused("exchanged already", lambda: state_of(sgd(DistributedDataParallel(model.module))))
    refused("already bound", lambda: state.bind(optimizer))
    refused("exchanged already", lambda: dgc.DistributedOptimizer(optimizer, compression=dgc.Compression.dgc()))
    other = dgc.ddp.CompressionState(dgc.Compression.dgc())
    refused("only be called once", lambda: model.register_comm_hook(other, dgc.ddp.compression_hook), RuntimeError)
    state.compression.close()

    model = DistributedDataParallel(make_model())
    wrapped = dgc.DistributedOptimizer(sgd(model), compression=(compression := dgc.Compression.dgc()))
    refused("exchanges gradients itself", lambda: state_of(wrapped))
    refused("exchanged already", lambda: state_of(sgd(model)))
    compression.close()

    model = DistributedDataParallel(make_model())
    model.register_comm_hook(dgc.ddp.CompressionState(dgc.Compression.dgc()), dgc.ddp.compression_hook)
    refused(r"state\.bind\(optimizer\) before the first", lambda: loss_of(model, 0).backward())

    model = DistributedDataParallel(make_model())
    model.register_comm_hook(dgc.Compression.dgc(), dgc.ddp.compression_hook)
    refused(r"dgc\.ddp\.CompressionState\(compression, optimizer\)", lambda: loss_of(model, 0).backward())

    refused("DDP's hook takes a compressor", lambda: dgc.ddp.CompressionState(None))
    refused(r"give a torch\.optim\.Optimizer", lambda: state_of(make_model()))
    refused("needs Horovod", lambda: state_of(sgd(make_model()), transport="mpi"))
    refused("momentum would be applied twice", lambda: state_of(sgd(make_model()), momentum=0.9))
    refused("sparsity", lambda: state_of(sgd(make_model()), sparsity=0.9 + dist.get_rank() / 20))


@case
def an_optimizer_of_some_parameters():
    model, _, _ = hooked(make_model(), lambda m: sgd(m.module[0]))
    on_every_rank(dgc.LayoutError, "give all to one optimizer", lambda: loss_of(model, 0).backward())


@case
def sparse_gradients_are_refused():
    model, _, _ = hooked(nn.Sequential(nn.Embedding(50, 20, sparse=True), nn.Linear(20, 6)))
    on_every_rank(dgc.ConfigError, "sparse=False", lambda: model(torch.arange(5)).square().mean().backward())


@case(size=(1, 2))
def another_size_than_horovods_is_refused(size):
    make = lambda: dgc.ddp.CompressionState(close_later(dgc.Compression.dgc()), sgd(make_model()))  # noqa: E731
    horovod = types.SimpleNamespace(is_initialized=lambda: True, size=lambda: size)
    with patch.dict(sys.modules, {"horovod.torch": horovod}):
        if size == 1:
            on_every_rank(dgc.ConfigError, "Horovod has 1 ranks and torch.distributed 2", make)
        else:
            make()


@case
def groups_of_ranks():
    pair, alone = dist.new_group([0, 1]), [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    model = DistributedDataParallel(make_model(), process_group=pair)
    optimizer = sgd(model)
    compression = close_later(dgc.Compression.dgc(**EXACT))
    state = dgc.ddp.CompressionState(compression, optimizer, process_group=pair)
    model.register_comm_hook(state, dgc.ddp.compression_hook)
    with Join([model, state]):
        train(model, optimizer, 3)
    reference = dense(make_model())
    train(*reference, 3)
    assert_close(model, reference[0])
    model, optimizer, state = hooked(make_model(), process_group=alone)  # one rank: DDP's hook without an exchange
    train(model, optimizer, 3)
    assert state.compression.engine is None
    assert optimizer.state_dict()["state"]


@case
def an_error_of_one_rank_is_raised_on_all():
    model, optimizer, state = hooked(make_model(), options={"sparsity": 0.9})
    train(model, optimizer, 2)
    optimizer.param_groups[0]["momentum"] = 0.5 + 0.1 * dist.get_rank()
    on_every_rank(dgc.ConfigError, "disagree in step 2", lambda: train(model, optimizer, 1))
    state.compression.reset()
    with pytest.raises(RuntimeError, match="INTERNAL ASSERT FAILED"):
        train(model, optimizer, 1)
    state.compression.close()
    optimizer.param_groups[0]["momentum"] = 0.5
    model = DistributedDataParallel(model.module)
    dgc.ddp.register(model, optimizer, dgc.Compression.dgc(sparsity=0.9))
    train(model, optimizer, 2)
    assert_identical(model)
