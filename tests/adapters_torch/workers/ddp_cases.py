"""DDP's communication hook on 2 real ranks under torchrun; Horovod and mpi4py cannot be imported."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import sys
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from adapters_torch.torchrun_tools import (
    EXACT,
    SGD,
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
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel
from worker_tools import case, run_cases

import dgc.torch as dgc

LEFT = {**EXACT, "momentum": 0.0, "weight_decay": 0.0}  # momentum and decay stay in the optimizer


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{**SGD, **options})


def hooked(module, make_optimizer=sgd, options=None, **ddp):
    """A DDP model with the hook, its optimizer, and the state."""
    model = DistributedDataParallel(module, **ddp)
    optimizer = make_optimizer(model)
    state = dgc.ddp.CompressionState(dgc.Compression.dgc(**(EXACT if options is None else options)), optimizer)
    model.register_comm_hook(state, dgc.ddp.compression_hook)
    return model, optimizer, state


def dense(module, make_optimizer=sgd, **ddp):
    model = DistributedDataParallel(module, **ddp)
    return model, make_optimizer(model)


def train(model, optimizer, steps=20, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def warned(function, match):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        function()
    return sum(bool(re.search(match, str(w.message))) for w in seen)


def both(steps_of, module=make_model, make_optimizer=sgd, options=None, **ddp):
    """Train by ``steps_of(model, optimizer)`` with the hook and without; they must end alike, on all ranks."""
    model, optimizer, state = hooked(module(), make_optimizer, options, **ddp)
    steps_of(model, optimizer)
    reference = dense(module(), make_optimizer, **ddp)
    steps_of(*reference)
    assert_close(model, reference[0])
    assert_identical(model)
    steps = state.compression.stats.steps
    state.compression.close()
    return steps


@case
def training_equals_ddp_at_sparsity_0():
    variants = (
        {},
        {"bucket_cap_mb": 0.004},
        {"gradient_as_bucket_view": True},
        {"static_graph": True, "bucket_cap_mb": 0.004},
        {"find_unused_parameters": True},
    )
    for ddp in variants:
        assert both(train, **ddp) == 20, ddp
    assert not [name for name in sys.modules if name.partition(".")[0] in ("horovod", "mpi4py")]


@case
def the_first_moment_is_the_compressors_once_entries_are_selected():
    model, optimizer, state = hooked(
        make_model(), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3), {"sparsity": 0.9, "rampup_begin_step": 3}
    )
    train(model, optimizer, 3)
    assert not any(state.compression.engine.adoption.hyper.momentum)
    train(model, optimizer, 9, start=3)
    assert min(m for m in state.compression.engine.adoption.hyper.momentum if m) > 0.8
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert_identical(model)
    state.compression.close()


@case
def other_optimizers_and_a_late_bind():
    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.0, 0.99))

    both(train, make_optimizer=adamw)
    both(train, make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3))
    later = {"sparsity": 0.9, "rampup_begin_step": 20}
    both(train, make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3), options=later)
    model = DistributedDataParallel(make_model())
    state = dgc.ddp.CompressionState(dgc.Compression.dgc(**EXACT), named_parameters=model.module.named_parameters())
    model.register_comm_hook(state, dgc.ddp.compression_hook)
    optimizer = sgd(model)
    wrapper = types.SimpleNamespace(optimizer=optimizer)  # as Lightning's and Fabric's
    state.bind(wrapper)
    train(model, optimizer)
    reference = dense(make_model())
    train(*reference)
    assert_close(model, reference[0])
    assert set(state.compression.state_dict()["parameters"]) == {n for n, _ in model.module.named_parameters()}
    assert state.compression.describe()["transport"] == "torch.distributed"
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert not optimizer.state_dict()["state"]
    state.compression.close()


@case
def replicas_are_identical_after_200_sparse_steps():
    model, optimizer, state = hooked(make_model(width=256), options={"sparsity": 0.99}, bucket_cap_mb=0.1)
    before = loss_of(model, 999).item()
    train(model, optimizer, 200)
    assert_identical(model)
    assert loss_of(model, 999).item() < before
    stats = state.compression.stats
    assert stats.steps == 200
    assert stats.last.bytes_sent < 0.1 * stats.last.dense_bytes
    state.compression.close()


@case
def habits_equal_ddp_at_sparsity_0():
    def accumulating(model, optimizer):
        for step in range(20):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            with model.no_sync():
                loss_of(model, 2 * step).backward()
            loss_of(model, 2 * step + 1).backward()
            optimizer.step()

    def scheduled(model, optimizer):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=30)
        for step in range(20):
            train(model, optimizer, 1, step)
            scheduler.step()

    def by_closure(model, optimizer):
        for step in range(20):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            assert optimizer.step(closure) > 0

    def clipping(model, optimizer):
        for step in range(20):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()

    def synced_twice(model, optimizer):  # without no_sync(), as some scripts accumulate
        for step in range(20):
            optimizer.zero_grad()
            loss_of(model, 2 * step).backward()
            loss_of(model, 2 * step + 1).backward()
            optimizer.step()

    for view in (False, True):
        ddp = {"gradient_as_bucket_view": view, "bucket_cap_mb": 0.004}
        assert both(accumulating, **ddp) == 20
        assert both(scheduled, **ddp) == 20
        assert both(by_closure, **ddp) == 20
        assert both(clipping, options=LEFT, **ddp) == 20
        assert both(synced_twice, options=LEFT, **ddp) == 40


@case
def scalers():
    for broken in (False, True):
        model, optimizer, state = hooked(make_model(), options={**LEFT, "loss_scale": (scaler := new_scaler())})
        reference = dense(make_model())
        for m, o, s in ((model, optimizer, scaler), (*reference, new_scaler())):
            for step in range(10):
                o.zero_grad()
                loss = s.scale(loss_of(m, step))
                (loss * float("inf") if broken and step == 3 and dist.get_rank() == 1 else loss).backward()
                s.unscale_(o)
                nn.utils.clip_grad_norm_(m.parameters(), 0.3)
                s.step(o)
                s.update()
        assert state.compression.stats.refused_steps == broken
        assert_identical(model)
        if not broken:  # what the other rank has computed in the step stays in its residual
            assert_close(model, reference[0])
        state.compression.close()


def new_scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)


@case
def clipping_the_velocity_is_a_warning():
    def clipped(norm, scaler=None):
        options = {**EXACT, **({"loss_scale": scaler} if scaler else {})}
        model, optimizer, state = hooked(make_model(), options=options)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), norm)
            scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()
        state.compression.close()

    match = "momentum=0 in the compressor.*local_grad_clip_norm"
    assert warned(lambda: clipped(0.01), match) == 1
    assert warned(lambda: clipped(0.01, new_scaler()), match) == 1
    assert warned(lambda: clipped(1e9), match) == 0
    assert warned(lambda: clipped(1e9, new_scaler()), match) == 0


@case
def frozen_layers():
    for view in (False, True):
        ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
        both(freezing, Branches, **ddp)
        both(freezing, Branches, options=LEFT, **ddp)
        both(freezing, Branches, lambda m: torch.optim.AdamW(m.parameters()), {**EXACT, "momentum": 0.0}, **ddp)
        for options in ({}, {"momentum": 0.0, "weight_decay": 0.0}):
            options = {"sparsity": 0.9, "min_numel": 64, **options}
            make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.0 if "momentum" in options else 0.9)
            model, optimizer, state = hooked(Branches(), lambda m, make=make: make(m.parameters()), options, **ddp)
            assert_frozen(model, optimizer, state.compression)
            state.compression.close()


@case
def a_layer_unfrozen_after_wrapping_is_refused():
    module = make_model()
    module[0].requires_grad_(False)
    model, optimizer, state = hooked(module)
    train(model, optimizer, 1)
    module[0].requires_grad_(True)
    match = "wrap the module in a new DistributedDataParallel and register a new compressor after adding or unfreezing"
    on_every_rank(dgc.LayoutError, match, lambda: train(model, optimizer, 1))
    state.compression.close()


@case
def unused_parameters():
    def by_one_rank(model, optimizer):
        for step in range(20):
            optimizer.zero_grad()
            loss_of(model, step, (step + dist.get_rank()) % 2 == 0).backward()
            optimizer.step()

    for view in (False, True):
        both(by_one_rank, Branches, find_unused_parameters=True, gradient_as_bucket_view=view)

    def by_none(model, optimizer):
        for step in range(20):
            optimizer.zero_grad(set_to_none=step % 3 == 0)
            loss_of(model, step, step % 2 == 0).backward()
            optimizer.step()

    for view in (False, True):
        both(by_none, Branches, find_unused_parameters=True, gradient_as_bucket_view=view, bucket_cap_mb=0.001)


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


@case
def parameters_that_are_not_contiguous():
    """DDP lays a bucket out in their strides, where GradBucket.gradients() reads it as if it were contiguous."""

    def used_in_turn(model, optimizer):
        for step in range(20):
            optimizer.zero_grad()
            loss_of(model, step, (step + dist.get_rank()) % 2 == 0).backward()
            optimizer.step()

    def with_a_buffer(model):
        optimizer = sgd(model)
        for p in model.parameters():
            generator = torch.Generator().manual_seed(p.numel())
            optimizer.state[p]["momentum_buffer"] = torch.empty_like(p).copy_(
                torch.randn(p.shape, generator=generator) / 20
            )
        return optimizer

    assert not all(p.is_contiguous() for p in Strided().parameters())
    for view in (False, True):
        ddp = {"gradient_as_bucket_view": view, "find_unused_parameters": True, "bucket_cap_mb": 0.001}
        both(used_in_turn, Strided, lambda m: sgd(m, weight_decay=0.05), **ddp)
        both(used_in_turn, Strided, with_a_buffer, **ddp)
        both(used_in_turn, Strided, sgd, LEFT, **ddp)

    def moved(to_hook):
        """Momentum and residuals that the hook has saved go on in dgc's optimizer, or the other way round."""
        options, module = {"sparsity": 0.9, "min_numel": 64}, Strided()
        make_hooked = lambda m: hooked(m, options=options, find_unused_parameters=True)  # noqa: E731

        def wrapped(module):
            compression = dgc.Compression.dgc(**options)
            optimizer = dgc.DistributedOptimizer(sgd(module), module.named_parameters(), compression=compression)
            return module, optimizer, types.SimpleNamespace(compression=compression)

        saved = None
        for make in (wrapped, make_hooked) if to_hook else (make_hooked, wrapped):
            model, optimizer, state = make(module)
            names = dict(
                zip(state.compression.state_dict()["parameters"], dict(module.named_parameters()), strict=True)
            )
            if saved is not None:
                own = {value: key for key, value in names.items()}
                saved["parameters"] = {own[name]: entry for name, entry in saved["parameters"].items()}
                state.compression.load_state_dict(saved)
            used_in_turn(model, optimizer)
            saved = state.compression.state_dict()
            saved["parameters"] = {names[name]: entry for name, entry in saved["parameters"].items()}
            state.compression.close()
        return module

    for to_hook in (False, True):
        straight = Strided()
        compression = dgc.Compression.dgc(sparsity=0.9, min_numel=64)
        optimizer = dgc.DistributedOptimizer(sgd(straight), straight.named_parameters(), compression=compression)
        used_in_turn(straight, optimizer)
        used_in_turn(straight, optimizer)
        compression.close()
        assert_close(moved(to_hook), straight)


@case
def gradients_that_share_memory():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(7)
            self.a, self.b = nn.Parameter(torch.randn(20, 5)), nn.Parameter(torch.randn(20, 5))

        def forward(self, x):
            return (x @ (self.a.unsqueeze(0) + self.b.unsqueeze(0))).squeeze(0)

    both(train, Sum, lambda m: sgd(m, weight_decay=0.05))


@case
def what_is_not_cleared_is_refused():
    def accumulating(model, optimizer):
        loss_of(model, 0).backward()
        loss_of(model, 1).backward()

    def twice(model, optimizer):
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.step()

    def local(model, optimizer):
        with model.no_sync():
            loss_of(model, 0).backward()
        optimizer.step()

    for view in (False, True):
        for steps, match in (
            (accumulating, r"call optimizer.zero_grad\(\) after each step\(\).*no_sync"),
            (twice, r"again without a backward pass"),
            (local, r"inside no_sync\(\)"),
        ):
            model, optimizer, state = hooked(make_model(), gradient_as_bucket_view=view)
            on_every_rank(dgc.DGCError, match, lambda: steps(model, optimizer))  # noqa: B023
            state.compression.close()


@case
def join_with_the_state():
    for difference in (1, 5, 17):
        for options in (EXACT, LEFT, {"sparsity": 0.99}):
            model, optimizer, state = hooked(make_model(width=128), options=options)
            reference = dense(make_model(width=128))
            count = 2 + difference * dist.get_rank()
            with Join([model, state]):
                train(model, optimizer, count)
            with Join([reference[0]]):
                train(*reference, count)
            assert_identical(model)
            assert state.compression.stats.steps == 2 + difference * (dist.get_world_size() - 1)
            if options in (EXACT, LEFT):
                assert_close(model, reference[0])
            train(model, optimizer, 5, start=30)
            assert_identical(model)
            state.compression.close()


@case
def the_state_that_a_checkpoint_asks_for_is_no_step():
    model, optimizer, state = hooked(make_model(), options={"sparsity": 0.9})
    train(model, optimizer, 2)
    optimizer.zero_grad()
    before = digest(model)
    get_state_dict(model, optimizer)
    assert (digest(model), optimizer.param_groups[0]["lr"], state.compression.stats.steps) == (before, 0.1, 2)
    train(model, optimizer, 2)
    assert_identical(model)
    state.compression.close()


@case
def join_in_the_middle_of_an_accumulation():
    """Rank 1 ends inside no_sync(): what it has accumulated is dropped, as by DDP, and replicas stay alike."""
    model, optimizer, state = hooked(
        make_model(), lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), {"sparsity": 0.9}
    )
    with Join([model, state]):
        for step in range(10 - 5 * dist.get_rank()):
            with contextlib.nullcontext() if step % 2 else model.no_sync():
                loss_of(model, step).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert_identical(model)
    train(model, optimizer, 5, start=30)
    assert_identical(model)
    state.compression.close()


@case
def join_without_the_state():
    def uneven(**options):
        make = functools.partial(torch.optim.SGD, lr=0.1, **options)
        model, optimizer, state = hooked(make_model(), lambda m: make(m.parameters()), {"sparsity": 0.9})
        try:
            with model.join():
                train(model, optimizer, 3 + 4 * dist.get_rank())
            assert_identical(model)
            train(model, optimizer, 5, start=30)
            assert_identical(model)
        finally:
            state.compression.close()

    uneven()
    on_every_rank(dgc.ConfigError, r"use Join\(\[model, state\]\)", lambda: uneven(momentum=0.9))


@case
def bad_joins():
    model, _, state = hooked(make_model())
    on_every_rank(dgc.ConfigError, r"Join\(\[model, state\]\)", lambda: Join([state, model]))
    on_every_rank(dgc.ConfigError, "divides by all", lambda: Join([model, state], divide_by_initial_world_size=False))
    state.compression.close()
    model, _, state = hooked(make_model(), options={"loss_scale": new_scaler()})
    on_every_rank(dgc.ConfigError, r"Join\(\[model\]\) alone", lambda: Join([model, state]))
    state.compression.close()


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

    refused("take a compressor from", lambda: dgc.ddp.CompressionState(None))
    refused(r"give a torch\.optim\.Optimizer", lambda: state_of(make_model()))
    refused("needs Horovod", lambda: state_of(sgd(make_model()), transport="mpi"))
    refused("momentum would be applied twice", lambda: state_of(sgd(make_model()), momentum=0.9))
    refused("sparsity", lambda: state_of(sgd(make_model()), sparsity=0.9 + dist.get_rank() / 20))


@case
def an_optimizer_of_some_parameters():
    model = DistributedDataParallel(make_model())
    state = dgc.ddp.CompressionState(dgc.Compression.dgc(), torch.optim.SGD(model.module[0].parameters(), lr=0.1))
    model.register_comm_hook(state, dgc.ddp.compression_hook)
    on_every_rank(dgc.LayoutError, "give all to one optimizer", lambda: loss_of(model, 0).backward())
    state.compression.close()


@case
def sparse_gradients_are_refused():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(50, 20, sparse=True), nn.Linear(20, 6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = dgc.ddp.CompressionState(dgc.Compression.dgc(), optimizer)
    model.register_comm_hook(state, dgc.ddp.compression_hook)
    on_every_rank(dgc.ConfigError, "sparse=False", lambda: model(torch.arange(5)).square().mean().backward())
    state.compression.close()


@case
def other_sizes_than_horovods():
    for name, size in (("horovod.torch", 1), ("horovod.torch", 2)):
        sys.modules[name] = types.SimpleNamespace(is_initialized=lambda: True, size=lambda: size)  # noqa: B023
        try:
            make = lambda: dgc.ddp.CompressionState(dgc.Compression.dgc(), sgd(make_model()))  # noqa: E731
            if size == 1:
                on_every_rank(dgc.ConfigError, "Horovod has 1 ranks and torch.distributed 2", make)
            else:
                make().compression.close()
        finally:
            del sys.modules[name]


@case
def groups_of_ranks():
    pair, alone = dist.new_group([0, 1]), [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    model = DistributedDataParallel(make_model(), process_group=pair)
    optimizer = sgd(model)
    state = dgc.ddp.CompressionState(dgc.Compression.dgc(**EXACT), optimizer, process_group=pair)
    model.register_comm_hook(state, dgc.ddp.compression_hook)
    with Join([model, state]):
        train(model, optimizer, 3)
    reference = dense(make_model())
    train(*reference, 3)
    assert_close(model, reference[0])
    state.compression.close()
    model = DistributedDataParallel(make_model(), process_group=alone)  # one rank: DDP's hook without an exchange
    optimizer = sgd(model)
    state = dgc.ddp.CompressionState(dgc.Compression.dgc(), optimizer, process_group=alone)
    model.register_comm_hook(state, dgc.ddp.compression_hook)
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
    gc.collect()  # the old one's hooks are gone with it
    dgc.ddp.register(model, optimizer, dgc.Compression.dgc(sparsity=0.9))
    train(model, optimizer, 2)
    assert_identical(model)


if __name__ == "__main__":
    run_cases()
