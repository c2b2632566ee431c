"""What scripts for Horovod do every day: on 2 real ranks, each habit is as right as in dense training, and no hang."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import sys
import warnings

import horovod.torch as hvd
import numpy as np
import torch
from adapters_torch.workers.tensors import through_file
from models import (
    assert_replicas_identical,
    each_way,
    flat,
    loss_of,
    make_model,
    on_every_rank,
    raises,
    train,
    worst_difference,
    wrap,
)
from worker_tools import case, run_cases

import dgc.torch as dgc

EXACT = dict(sparsity=0.0, momentum_masking=False, values="float32")
SGD = dict(momentum=0.9, nesterov=True, weight_decay=0.01)
NOTHING = dict(momentum=0.0, nesterov=False, weight_decay=0.0)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **SGD, **options})


def plain_sgd(model):
    return sgd(model, **NOTHING)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def dense(model, optimizer, **hvd_options):
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **hvd_options), None


def distribute(way, model, optimizer, hvd_options=None, **options):
    """Wrapped by stock Horovod without compression, or by Horovod's or dgc's optimizer."""
    if way == "dense":
        return dense(model, optimizer, **(hvd_options or {}))
    return wrap(way, model, optimizer, hvd_options=hvd_options, **options)


def close(compression):
    if compression is not None:
        compression.close()


def broadcast(model, optimizer):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def quiet(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


# -- synchronize() ---------------------------------------------------------------------------------------------------


def clip(optimizer, model, scaler):
    if scaler is not None:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def finish(optimizer, scaler):
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def clip_then_skip(optimizer, model, scaler):
    optimizer.synchronize()
    clip(optimizer, model, scaler)
    with optimizer.skip_synchronize():
        finish(optimizer, scaler)


def clip_then_step(optimizer, model, scaler):
    optimizer.synchronize()
    clip(optimizer, model, scaler)
    finish(optimizer, scaler)


def synchronize_three_times(optimizer, model, scaler):
    optimizer.synchronize()
    clip(optimizer, model, scaler)
    optimizer.synchronize()
    optimizer.synchronize()
    finish(optimizer, scaler)


def mixed(optimizer, model, scaler, count=itertools.count()):  # noqa: B008
    (clip_then_skip, clip_then_step, synchronize_three_times)[next(count) % 3](optimizer, model, scaler)


def run_steps(way, make_optimizer, update, steps=8, passes=1, scale="", hvd_options=None, **options):
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7) if scale else None
    if scale and way != "dense":
        options["loss_scale"] = scaler
    hvd_options = {"backward_passes_per_step": passes, **(hvd_options or {})}
    optimizer, compression = distribute(way, model, make_optimizer(model), hvd_options, **options)
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(1 if step == 3 else passes):  # one step comes before its last pass
            loss = loss_of(model, step * passes + i)
            if scale == "overflow" and step == 5 and hvd.rank() == 1:
                loss = loss * float("inf")
            (loss if scaler is None else scaler.scale(loss)).backward()
        quiet(update, optimizer, model, scaler)
    return model, compression


@case
def a_second_synchronize_hands_back_the_same_results():
    """Also by step(), after clipping, unscaling, accumulation, in groups, and mixed with skip_synchronize()."""
    kinds = [{}, {"passes": 2}, {"scale": "overflow"}, {"hvd_options": {"groups": 2}}]
    for way, make_optimizer, kind in itertools.product("ab", (sgd, adam), kinds):
        if "hvd_options" in kind and way == "b":
            continue
        label = f"{way} {make_optimizer.__name__} {kind}"
        expected, first = run_steps(way, make_optimizer, clip_then_skip, sparsity=0.9, **kind)
        for update in (clip_then_step, synchronize_three_times, mixed):
            model, second = run_steps(way, make_optimizer, update, sparsity=0.9, **kind)
            assert torch.equal(flat(model), flat(expected)), f"{label} {update.__name__}"
            assert_replicas_identical(model, f"{label} {update.__name__}")
            assert second.stats.steps == first.stats.steps == 8
            assert second.describe()["step"] == 8 - first.stats.refused_steps == (7 if "scale" in kind else 8)
            assert np.isclose(second.residual_norm, first.residual_norm, rtol=1e-6)
            placeholders = second.stats.total.bytes_sent - first.stats.total.bytes_sent
            times = {clip_then_step: 1, synchronize_three_times: 3, mixed: None}[update]
            if times and "scale" not in kind:
                assert placeholders == (8 * times * 8 * 4 if way == "a" else 0), placeholders


@case
def synchronize_clip_and_step_equal_dense_training():
    """Clipping limits the same gradients where the optimizer keeps its own momentum, or has none."""
    for way, make_optimizer, kind in itertools.product(
        "ab", (plain_sgd, adam), ({}, {"passes": 2}, {"scale": "finite"})
    ):
        expected, _ = run_steps("dense", make_optimizer, clip_then_step, **kind)
        for update in (clip_then_step, synchronize_three_times):
            model, _ = run_steps(way, make_optimizer, update, **kind, **EXACT)
            bound = 1e-3 if make_optimizer is adam else 1e-5  # Adam divides by small numbers
            assert worst_difference(model, expected) <= bound, (way, kind, worst_difference(model, expected))


@case
def a_limit_that_is_not_reached_equals_dense_training_with_momentum():
    """With adopted momentum an exchange returns a velocity, which a second exchange would make a gradient again."""

    def update(optimizer, model, scaler):
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        finish(optimizer, scaler)

    expected, _ = run_steps("dense", sgd, update)
    for way in "ab":
        model, _ = run_steps(way, sgd, update, **EXACT)
        assert worst_difference(model, expected) <= 1e-5, (way, worst_difference(model, expected))


@case
def gradients_that_are_taken_out_after_synchronize():
    """A layer that is not to move yet: its ``.grad`` is removed, and step() averages what is left no second time."""
    for way, passes in itertools.product("ab", (1, 2)):
        models = []
        for kind in ("dense", way):
            model = make_model()
            options = {} if kind == "dense" else EXACT
            optimizer, compression = distribute(
                kind, model, plain_sgd(model), {"backward_passes_per_step": passes}, **options
            )
            for step in range(6):
                optimizer.zero_grad()
                for i in range(passes):
                    loss_of(model, step * passes + i).backward()
                optimizer.synchronize()
                if step < 3:
                    model.last.zero_grad(set_to_none=True)
                quiet(optimizer.step)
            models.append(model)
            if compression is not None:
                assert compression.describe()["step"] == 6
            close(compression)
        assert worst_difference(models[1], models[0]) <= 1e-5, (way, passes, worst_difference(models[1], models[0]))


@case("mpirun", "gloo")
def changing_averaged_gradients_on_one_rank_alone_is_an_error():
    """Dense training averages them again in step(); here the replicas would drift apart."""

    def scale(parameters):
        for p in parameters:
            p.grad.mul_(0.5)

    def remove(parameters):
        for p in parameters[-2:]:
            p.grad = None

    for way, change in itertools.product("ab", (scale, remove)):
        model = make_model()
        optimizer, _ = wrap(way, model, sgd(model), sparsity=0.99)
        loss_of(model, 0).backward()
        optimizer.synchronize()
        if hvd.rank() == 1:
            change([p for p in model.parameters() if p.requires_grad])
        before = flat(model).clone()
        on_every_rank(
            dgc.ConfigError, "in different ways", lambda o=optimizer: quiet(o.step), f"{way} {change.__name__}"
        )
        assert torch.equal(flat(model), before)


@case
def a_closure_that_synchronizes():
    """It averages its own gradients; step() must not take the last results for new gradients."""
    for way, skips in itertools.product("ab", (False, True)):
        models = []
        for kind in ("dense", way):
            model = make_model()
            optimizer, compression = distribute(
                kind, model, sgd(model, weight_decay=0.0), **(EXACT if kind != "dense" else {})
            )
            for step in range(6):

                def closure(step=step, model=model, optimizer=optimizer):
                    optimizer.zero_grad()
                    loss = loss_of(model, step)
                    loss.backward()
                    optimizer.synchronize()
                    return loss

                with optimizer.skip_synchronize() if skips else contextlib.nullcontext():
                    quiet(optimizer.step, closure)
            models.append(model)
            if skips and compression is not None:
                assert compression.describe()["step"] == 6
            close(compression)
        assert worst_difference(models[1], models[0]) <= 1e-5, (way, skips)


# -- checkpoints of the optimizer alone ------------------------------------------------------------------------------


def restored_run(way, saved, load, *, make_optimizer=sgd, steps=6, **options):
    """A new model and a new optimizer in which rank 0, or every rank, loads ``saved``; trained on."""
    weights, state = saved
    model = make_model(seed=4 + hvd.rank())
    base = make_optimizer(model)
    everywhere, before = load in ("all before", "all after"), load in ("all before", "root before")
    if before and (everywhere or hvd.rank() == 0):
        base.load_state_dict(through_file(state))
    optimizer, compression = distribute(way, model, base, **options)
    if everywhere or hvd.rank() == 0:
        model.load_state_dict(weights)
        if not before:
            optimizer.load_state_dict(through_file(state))
    if not everywhere:
        broadcast(model, optimizer)
    train(optimizer, model, steps, start=6)
    return model, optimizer, compression


LOADS = ("root after", "root before", "all after", "all before")


def first_run(way, make_optimizer=sgd, **options):
    """Six steps; the saved state of model and optimizer."""
    model = make_model()
    optimizer, compression = distribute(way, model, make_optimizer(model), **options)
    broadcast(model, optimizer)
    train(optimizer, model, 6)
    saved = through_file(model.state_dict()), through_file(optimizer.state_dict())
    close(compression)
    return saved


def without_buffers(saved):
    """What a dense run continues from that begins with no momentum, as a compressed one does."""
    weights, state = saved
    return weights, {**state, "state": {}}


@case
def a_state_dict_holds_the_users_own_options_and_no_empty_entries():
    for way, broadcasts in itertools.product("ab", (False, True)):
        model = make_model()
        optimizer, _ = wrap(way, model, sgd(model), sparsity=0.9)
        if broadcasts:
            broadcast(model, optimizer)
        seen = []
        for steps in (0, 3):
            train(optimizer, model, steps)
            for saved in (optimizer.state_dict(), copy.deepcopy(optimizer.state_dict())):
                group = saved["param_groups"][0]
                assert {name: group[name] for name in SGD} == SGD, group
                assert all(saved["state"].values()), saved["state"]
            seen.append(len(saved["state"]))
        assert seen[1] == 0, "momentum is the compressor's"
        plain = sgd(make_model())
        plain.load_state_dict(saved)
        assert plain.param_groups[0]["momentum"] == 0.9


@case
def a_state_dict_loads_before_or_after_wrapping_on_one_rank_or_all():
    for way, load in itertools.product("ab", LOADS):
        saved = quiet(first_run, way, **EXACT)
        expected, _, _ = restored_run("dense", without_buffers(saved), "all after")
        model, optimizer, compression = quiet(restored_run, way, saved, load, **EXACT)
        assert worst_difference(model, expected) <= 1e-5, (way, load, worst_difference(model, expected))
        assert {name: optimizer.param_groups[0][name] for name in SGD} == SGD
        compression.close()
        saved = quiet(first_run, way, sparsity=0.99)
        model, _, compression = quiet(restored_run, way, saved, load, sparsity=0.99)
        assert_replicas_identical(model, f"{way} {load}")


@case
def adams_state_loads_on_one_rank_or_all():
    for way, load in itertools.product("ab", ("root after", "all after")):
        saved = first_run(way, adam, **EXACT)
        expected, _, _ = restored_run("dense", saved, "all after", make_optimizer=adam)
        model, _, compression = restored_run(way, saved, load, make_optimizer=adam, **EXACT)
        assert worst_difference(model, expected) <= 1e-3, (way, load, worst_difference(model, expected))
        compression.close()
        model, _, compression = restored_run(way, saved, load, make_optimizer=adam, sparsity=0.99)
        assert_replicas_identical(model, f"adam {way} {load}")


@case
def a_dense_runs_state_brings_its_momentum():
    """Twelve dense steps equal six and six compressed ones, loaded after wrapping."""
    saved = first_run("dense")
    for way, load in itertools.product("ab", ("root after", "all after")):
        expected, _, _ = restored_run("dense", saved, "all after")
        model, _, _ = restored_run(way, saved, load, **EXACT)
        assert worst_difference(model, expected) <= 1e-5, (way, load, worst_difference(model, expected))


@case
def restoring_within_one_process():
    """Back to the best model, or to the one before a search for a learning rate: on rank 0 and broadcast, or on all."""
    for way, everywhere, searches in itertools.product("ab", (False, True), (False, True)):
        runs = {}
        for kind, options in (("dense", {}), (way, EXACT), (f"{way} sparse", dict(sparsity=0.99))):
            model = make_model()
            # Without decay, which in stock Horovod moves the parameters in the step that a broadcast makes.
            base = sgd(model, weight_decay=0.0)
            optimizer, compression = distribute(kind[0] if kind != "dense" else kind, model, base, **options)
            quiet(broadcast, model, optimizer)
            if not searches:
                train(optimizer, model, 4)
            saved = through_file(model.state_dict()), through_file(optimizer.state_dict())
            saved[1]["state"] = {}
            if searches:
                for group in optimizer.param_groups:
                    group["lr"] = 0.5
            train(optimizer, model, 4, start=20)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if everywhere or hvd.rank() == 0:
                    model.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
                if not everywhere:
                    broadcast(model, optimizer)
                train(optimizer, model, 4, start=4)
            told = [str(w.message) for w in caught if "save_checkpoint" in str(w.message)]
            assert len(told) == (kind != "dense" and hvd.rank() == 0), told
            assert_replicas_identical(model, f"{kind} {everywhere} {searches}")
            runs[kind] = model
            close(compression)
        difference = worst_difference(runs[way], runs["dense"])
        assert difference <= 1e-5, (way, everywhere, searches, difference)


@case
def nothing_of_the_run_that_was_left_survives():
    """A step of zero gradients after the restore must move nothing."""
    for way, everywhere in itertools.product("ab", (False, True)):
        model = make_model()
        optimizer, compression = wrap(way, model, sgd(model, weight_decay=0.0), sparsity=0.99)
        saved = through_file(optimizer.state_dict())
        train(optimizer, model, 5)
        assert compression.residual_norm > 0
        if everywhere or hvd.rank() == 0:
            optimizer.load_state_dict(saved)
        if not everywhere:
            broadcast(model, optimizer)
        before = flat(model)
        optimizer.zero_grad()
        (0 * loss_of(model, 9)).backward()
        quiet(optimizer.step)
        assert torch.equal(flat(model), before)
        assert compression.residual_norm == 0
        assert compression.describe()["step"] == 6, "the schedule goes on"


@case("mpirun", "gloo")
def a_state_loaded_on_one_rank_and_never_broadcast_is_an_error():
    for way, model, optimizer, _ in each_way(sgd, sparsity=0.9):
        saved = through_file(optimizer.state_dict())
        train(optimizer, model, 2)
        if hvd.rank() == 0:
            optimizer.load_state_dict(saved)
        match = "broadcast the optimizer's state"
        quiet(on_every_rank, dgc.ConfigError, match, lambda: train(optimizer, model, 1), way)  # noqa: B023


@case("gloo")
def a_job_goes_on_when_children_end():
    """As those of a data loader do; under MPI this is in ``transport/test_mpi_exit.py``."""
    model = make_model()
    optimizer, _ = wrap("b", model, sgd(model), sparsity=0.9)
    for step in range(6):
        train(optimizer, model, 1, start=step)
        if step in (2, 4):
            child = os.fork()
            if child == 0:
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert_replicas_identical(model, "after children have ended")


@case
def a_model_that_was_restored_on_one_rank_alone_is_an_error():
    for way, model, optimizer, _ in each_way(sgd, sparsity=0.9):
        train(optimizer, model, 2)
        if hvd.rank() == 0:
            model.load_state_dict(make_model(seed=3).state_dict())
            optimizer.load_state_dict(through_file(optimizer.state_dict()))
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        quiet(on_every_rank, dgc.ConfigError, "broadcast_parameters", lambda: train(optimizer, model, 1), way)  # noqa: B023


@case
def a_state_loaded_before_the_first_step_is_a_warning_only_where_momentum_is_lost():
    """Accelerate loads an optimizer's own state as soon as it gets it."""
    for way in "ab":
        trained = make_model()
        optimizer, compression = wrap(way, trained, sgd(trained), sparsity=0.9)
        fresh = through_file(optimizer.state_dict())
        train(optimizer, trained, 2)
        stepped = through_file(optimizer.state_dict())
        compression.close()
        for saved, lost in ((fresh, 0), (stepped, 1)):
            for everywhere in (True, False):
                model = make_model()
                optimizer, compression = wrap(way, model, sgd(model), sparsity=0.9)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    if everywhere or hvd.rank() == hvd.size() - 1:
                        optimizer.load_state_dict(saved)
                        optimizer.load_state_dict(through_file(optimizer.state_dict()))
                    model.load_state_dict(trained.state_dict())
                    if not everywhere:
                        hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.size() - 1)
                    train(optimizer, model, 2)
                told = [str(w.message) for w in caught if "momentum begins at 0" in str(w.message)]
                assert len(told) == (lost and hvd.rank() == 0), (way, lost, everywhere, told)


@case
def the_compressors_own_state_may_be_loaded_before_or_after_the_optimizers():
    for way, first in itertools.product("ab", ("optimizer", "compressor")):
        straight, model = make_model(), make_model()
        optimizer, compression = wrap(way, straight, sgd(straight), sparsity=0.9)
        train(optimizer, straight, 4)
        weights, states = (
            through_file(straight.state_dict()),
            (through_file(optimizer.state_dict()), compression.state_dict()),
        )
        train(optimizer, straight, 4, start=4)
        compression.close()
        optimizer, compression = wrap(way, model, sgd(model), sparsity=0.9)
        model.load_state_dict(weights)
        if first == "optimizer":
            optimizer.load_state_dict(states[0])
        compression.load_state_dict(states[1])
        if first == "compressor":
            optimizer.load_state_dict(states[0])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(optimizer, model, 4, start=4)
        assert torch.equal(flat(model), flat(straight)), (way, first)


@case
def a_state_that_is_cleared_by_hand():
    """``optimizer.state.clear()`` and a new ``defaultdict``: momentum stays with the compressor, and nothing breaks."""
    for way in "ab":
        straight, model = make_model(), make_model()
        for m in (straight, model):
            optimizer, _ = wrap(way, m, sgd(m), sparsity=0.9)
            for step in range(6):
                if m is model:
                    optimizer.state.clear()
                train(optimizer, m, 1, start=step)
        assert torch.equal(flat(model), flat(straight))


# -- options that change ---------------------------------------------------------------------------------------------


@case
def options_changed_in_mid_training_are_followed():
    """Momentum, decay and Nesterov set by hand, multiplied, or switched off."""

    def change(group, step):
        if step == 4:
            group["weight_decay"] = 0
        if step == 6:
            group["nesterov"] = False
        if step == 8:
            group["momentum"] *= 0.5
        if step == 11:
            group["momentum"] = 0
        if step == 13:
            group["weight_decay"] = 0.1

    for way in "ab":
        models = []
        for kind, options in (("dense", {}), (way, EXACT), (way, dict(rampup_begin_step=1000))):
            model = make_model()
            optimizer, compression = distribute(kind, model, sgd(model), **options)
            train(optimizer, model, 16, after=lambda step, o=optimizer: change(o.param_groups[0], step))
            models.append(model)
            close(compression)
        for model in models[1:]:
            assert worst_difference(model, models[0]) <= 1e-5, (way, worst_difference(model, models[0]))


@case
def schedulers_made_before_or_after_wrapping():
    for way, early in itertools.product("ab", (False, True)):
        models = []
        for kind in ("dense", way):
            model = make_model()
            base = sgd(model)

            def schedule(optimizer):
                return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=30)

            scheduler = schedule(base) if early else None
            optimizer, compression = distribute(kind, model, base, **(EXACT if kind != "dense" else {}))
            scheduler = scheduler or schedule(optimizer)
            train(optimizer, model, 12, after=lambda step, s=scheduler: quiet(s.step))
            models.append(model)
            close(compression)
        assert worst_difference(models[1], models[0]) <= 1e-5, (way, early, worst_difference(models[1], models[0]))


@case
def the_groups_hold_the_users_options_except_during_an_update():
    for _, model, optimizer, _ in each_way(sgd, sparsity=0.9):
        seen = []
        optimizer.register_step_pre_hook(lambda o, *_, seen=seen: seen.append(o.param_groups[0]["momentum"]))
        train(optimizer, model, 2)
        assert set(seen) == {0}, seen
        assert {name: optimizer.param_groups[0][name] for name in SGD} == SGD
        # A step that fails leaves them to the next look.
        bad = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        raises(ZeroDivisionError, "", optimizer.step)
        bad.remove()
        assert optimizer.state_dict()["param_groups"][0]["momentum"] == 0.9


if __name__ == "__main__":
    run_cases()
