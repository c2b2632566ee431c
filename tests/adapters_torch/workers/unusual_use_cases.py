"""What went wrong for users who did the unusual: on 2 real ranks, each is right or a clear error on every rank."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import warnings
from functools import partial

import horovod.torch as hvd
import pytest
import torch
from models import (
    assert_replicas_identical,
    dense_reference,
    each_way,
    flat,
    loss_of,
    make_model,
    on_every_rank,
    sgd,
    shared_folder,
    train,
    worst_difference,
    wrap,
)
from worker_tools import case, run_cases

import dgc.torch as dgc

EXACT = dict(sparsity=0.0, momentum_masking=False, values="float32")


@case
def a_broadcast_after_loading_changes_nothing():
    """Load our own checkpoint on all ranks, then broadcast parameters and optimizer state, as Horovod scripts do."""
    for way in "ab":
        straight = make_model()
        optimizer, compression = wrap(way, straight, sgd(straight, weight_decay=0.01), sparsity=0.9)
        train(optimizer, straight, 4)
        folder = shared_folder(f"broadcast {way}")
        dgc.save_checkpoint(folder, model=straight, optimizer=optimizer, compression=compression)
        train(optimizer, straight, 4, start=4)
        compression.close()
        resumed = make_model(seed=4)
        optimizer, compression = wrap(way, resumed, sgd(resumed, weight_decay=0.01), sparsity=0.9)
        dgc.load_checkpoint(folder, model=resumed, optimizer=optimizer, compression=compression)
        hvd.broadcast_parameters(resumed.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        train(optimizer, resumed, 4, start=4)
        assert torch.equal(flat(resumed), flat(straight)), way


@case
def an_optimizer_that_was_not_bound_is_refused_where_the_compressor_has_momentum():
    for way, momentum in itertools.product("ab", (0.9, 0.0)):
        model = make_model()
        optimizer, compression = wrap(way, model, sgd(model, momentum=momentum), sparsity=0.9)
        train(optimizer, model, 2)
        other = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.8, weight_decay=0.1)
        before = flat(model).clone()
        if momentum:
            on_every_rank(dgc.ConfigError, "of the optimizer that was bound", other.step, way)
            assert torch.equal(flat(model), before)
        else:
            other.step()
        assert (other.param_groups[0]["momentum"], other.param_groups[0]["weight_decay"]) == (0.8, 0.1)
        compression.close()


@case
def explicit_momentum_takes_the_decay_along():
    for way in "ab":
        model = make_model()
        expected = dense_reference(model, 10, momentum=0.9, weight_decay=0.05)
        plain = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.05)
        optimizer, _ = wrap(way, model, plain, momentum=0.9, **EXACT)
        train(optimizer, model, 10)
        assert worst_difference(model, expected) <= 1e-5


class Normalised(torch.optim.SGD):
    """Gives every gradient the norm 1 before the update, much as LARS does."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad /= p.grad.norm() + 1e-9
        return super().step(closure)


class Collecting(torch.optim.SGD):
    """Changes gradients where SGD collects them."""

    def _init_group(self, group, params, grads, *others):
        found = super()._init_group(group, params, grads, *others)
        grads[:] = [g / (g.norm() + 1e-9) for g in grads]
        return found


@case
def a_step_of_the_users_own_keeps_its_momentum_and_decay():
    options = dict(lr=0.02, momentum=0.9, weight_decay=0.05)
    for kind in (Normalised, Collecting):
        dense = make_model()
        optimizer = kind(dense.parameters(), **options)
        train(hvd.DistributedOptimizer(optimizer, named_parameters=dense.named_parameters()), dense, 10)
        for way in "ab":
            model = make_model()
            with pytest.warns(RuntimeWarning, match=r"has a step\(\) of its own: its momentum stays in it"):
                optimizer, _ = wrap(way, model, kind(model.parameters(), **options), **EXACT)
            train(optimizer, model, 10)
            assert worst_difference(model, dense) <= 1e-5, (kind, way, worst_difference(model, dense))
            assert all(optimizer.state[p]["momentum_buffer"].any() for p in model.parameters() if p.requires_grad)


class Counting(torch.optim.SGD):
    """Leaves gradients and momentum to SGD."""

    def step(self, closure=None):
        self.decays = [group["weight_decay"] for group in self.param_groups]
        return super().step(closure)


@case
def the_advice_about_a_step_of_the_users_own_is_momentum_sgd_with_decay():
    for way in "ab":
        model = make_model()
        expected = dense_reference(model, 10, momentum=0.9, weight_decay=0.05)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plain = Counting(model.parameters(), lr=0.1)
            optimizer, compression = wrap(way, model, plain, momentum=0.9, weight_decay=0.05, **EXACT)
            train(optimizer, model, 10)
        assert worst_difference(model, expected) <= 1e-5
        compression.close()
        model = make_model()
        plain = Counting(model.parameters(), lr=0.1, weight_decay=0.05)
        with pytest.warns(RuntimeWarning, match="its weight decay stays in it, outside of the momentum"):
            optimizer, compression = wrap(way, model, plain, momentum=0.9, **EXACT)
        train(optimizer, model, 2)
        assert optimizer.decays == [0.05], "it is the step's"


@case
def adams_first_moment_behind_the_compressors_momentum_is_told():
    for kind, told in ((torch.optim.AdamW, True), (torch.optim.Adam, True), (torch.optim.RMSprop, False)):
        for momentum in (0.9, 0.0, None):
            model = make_model()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                _, _ = wrap("b", model, kind(model.parameters(), lr=0.01), momentum=momentum)
            said = [str(w.message) for w in caught if "smooths what comes out of it once more" in str(w.message)]
            assert len(said) == (told and momentum == 0.9), (kind, momentum, said)
            assert all("leave momentum out" in text for text in said)
    model = make_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adam = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.0, 0.99))
        optimizer, _ = wrap("b", model, adam, momentum=0.9, sparsity=0.9)
        train(optimizer, model, 4)


@case
def a_layer_unfrozen_after_wrapping():
    for way, model, optimizer, _ in each_way(sparsity=0.9):
        train(optimizer, model, 1)
        model.frozen.requires_grad_(True)
        match = "build a new optimizer and wrap it after adding or unfreezing"
        on_every_rank(dgc.LayoutError, match, lambda o=optimizer, m=model: train(o, m, 1), way)


@case
def a_refused_construction_takes_nothing():
    model = make_model()
    groups = [
        {"params": model.first.parameters(), "momentum": 0.9, "weight_decay": 0.1},
        {"params": model.last.parameters(), "momentum": 0.9, "dampening": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    on_every_rank(dgc.ConfigError, "dampening", lambda: wrap("a", model, optimizer))
    assert [g["momentum"] for g in optimizer.param_groups] == [0.9, 0.9]
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    different = sgd(model, momentum=0.9 - 0.1 * hvd.rank())
    on_every_rank(dgc.LayoutError, "momentum", lambda: wrap("a", model, different), "differs")
    assert different.param_groups[0]["momentum"] == 0.9 - 0.1 * hvd.rank()


@case
def a_refused_wrapping_leaves_the_next_ones_gradients_alone():
    for way in "ab":
        runs = []
        for mistake in (False, True):
            model = make_model()
            if mistake:
                refused = sgd(model, dampening=0.5)
                on_every_rank(dgc.ConfigError, "dampening", lambda m=model, o=refused: wrap("b", m, o), way)
            optimizer, _ = wrap(way, model, sgd(model), sparsity=0.9)
            train(optimizer, model, 5)
            runs.append(flat(model))
        assert torch.equal(*runs), way


@case
def names_that_are_missing_on_one_rank():
    model = make_model()
    named = list(model.named_parameters())[hvd.rank() :]
    on_every_rank(dgc.LayoutError, "have no name", lambda: dgc.Compression.dgc(named, optimizer=sgd(model)))


@case
def gradients_that_are_changed_while_they_are_exchanged():
    """What was read of them before and after is a matter of chance."""

    def clip(model, optimizer):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    def replace(model, optimizer):
        model.left.weight.grad = model.left.weight.grad / 2
        optimizer.step()

    def scale(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        scaler.scale(torch.zeros(1))
        scaler.step(optimizer)

    def skip(model, optimizer):
        with optimizer.skip_synchronize():
            optimizer.step()

    def unscale(model, optimizer):
        known.unscale_(optimizer)
        optimizer.synchronize()

    for change in (clip, replace, scale, skip, unscale):
        model = make_model()
        known = torch.amp.GradScaler("cpu", init_scale=256.0)
        optimizer, _ = wrap("b", model, sgd(model), sparsity=0.9, loss_scale=known if change is unscale else 1)
        known.scale(loss_of(model, 0)).backward()
        before = flat(model).clone()
        run = partial(change, model, optimizer)
        on_every_rank(dgc.LayoutError, r"call optimizer.synchronize\(\) first", run, change.__name__)
        assert torch.equal(flat(model), before)


@case
def gradients_that_are_changed_before_they_are_exchanged():
    """By a hook that was there before the wrapping, or in passes that are added up."""
    model, expected = make_model(), make_model()
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(halve)
    optimizer, _ = wrap("b", model, sgd(model), hvd_options={"backward_passes_per_step": 1}, **EXACT)
    train(optimizer, model, 3)
    dense = hvd.DistributedOptimizer(sgd(expected), named_parameters=expected.named_parameters())
    for step in range(3):
        dense.zero_grad()
        (loss_of(expected, step) / 2).backward()
        dense.step()
    assert worst_difference(model, expected) <= 1e-5


def halve(p):
    p.grad.mul_(0.5)


@case
def a_hook_that_changes_gradients_after_the_wrapping():
    model = make_model()
    optimizer, _ = wrap("b", model, sgd(model), sparsity=0.9)
    model.left.weight.register_post_accumulate_grad_hook(halve)
    loss_of(model, 0).backward()
    on_every_rank(dgc.LayoutError, "register a hook", optimizer.step)


@case
def an_optimizer_that_is_copied():
    model = make_model()
    optimizer, _ = wrap("b", model, sgd(model), sparsity=0.9)
    train(optimizer, model, 1)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps, lambda o: copy.deepcopy(dgc.fuse_optimizer(o))):
        with pytest.raises(TypeError, match="cannot be copied"):
            copied(optimizer)


@case
def a_second_optimizer_over_the_same_parameters():
    """The first one is referred to still, as by a scheduler."""
    model = make_model()
    expected = dense_reference(dense_reference(model, 2, momentum=0.9), 3, momentum=0.9)
    first, _ = wrap("b", model, sgd(model), **EXACT)
    train(first, model, 2)
    second, _ = wrap("b", model, sgd(model), **EXACT)
    model.zero_grad()
    train(second, model, 3)
    assert worst_difference(model, expected) <= 1e-5
    model.zero_grad()
    loss_of(model, 8).backward()
    on_every_rank(dgc.ConfigError, "wrapped since", first.step)


@case
def a_class_whose_step_was_replaced():
    class Replaced(torch.optim.SGD):
        pass

    def step(self, closure=None):
        return torch.optim.SGD.step(self, closure)

    def plain(self, closure=None):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p -= 0.1 * p.grad

    for replacement in (step, plain):
        model = make_model()
        expected = dense_reference(model, 3)
        optimizer = Replaced(model.parameters(), lr=0.1)
        Replaced.step = replacement
        optimizer, _ = wrap("b", model, optimizer, **EXACT)
        train(optimizer, model, 3)
        assert worst_difference(model, expected) <= 1e-5, replacement.__name__


@case
def backward_passes_per_step_set_as_an_attribute():
    """Horovod reads it when a step is exchanged."""
    models = []
    for dense in (True, False):
        model = make_model()
        optimizer = sgd(model)
        if dense:
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        else:
            optimizer, _ = wrap("b", model, optimizer, **EXACT)
        optimizer.backward_passes_per_step = 2
        train(optimizer, model, 1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, 10 + step).backward()
            loss_of(model, 20 + step).backward()
            optimizer.step()
        models.append(model)
    assert worst_difference(models[1], models[0]) <= 1e-5


@case
def tied_parameters_named_twice():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(40, 40), "b": torch.nn.Linear(40, 40)})
    model["b"].weight = model["a"].weight
    optimizer = sgd(model)
    compression = dgc.Compression.dgc(model.named_parameters(remove_duplicate=False), optimizer=optimizer, sparsity=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    model["b"](model["a"](torch.ones(4, 40))).sum().backward()
    optimizer.step()
    assert_replicas_identical(model, "tied")
    compression.close()


@case
def a_step_that_one_rank_gives_up():
    """Rank 0 resets in the middle of a step: rank 1 hears of it, and after a reset everywhere training goes on."""
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model), sparsity=0.9)
    train(optimizer, model, 1)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    if hvd.rank() == 0:
        compression.reset()
    else:
        with contextlib.suppress(dgc.DGCError):  # the message of rank 0 may be out already
            optimizer.step()
        compression.reset()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = flat(model).clone()
    train(optimizer, model, 2)
    assert not torch.equal(flat(model), before)
    assert_replicas_identical(model, "given up")


if __name__ == "__main__":
    run_cases()
