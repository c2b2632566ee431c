"""``synchronize()`` and ``skip_synchronize()``, on 2 real ranks."""

import horovod.torch as hvd
import numpy as np
import torch
from models import (
    EXACT,
    assert_replicas_identical,
    close,
    distribute,
    flat,
    loss_of,
    make_model,
    on_every_rank,
    quiet,
    run_steps,
    sgd,
    worst_difference,
    wrap,
)
from worker_tools import case, warned

import dgc.torch as dgc
from dgc.errors import DGCError

OPTIMIZERS = {
    "SGD": lambda m: sgd(m, nesterov=True, weight_decay=0.01),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
}
KINDS = {
    "plain": {},
    "accumulated": {"passes": 2},
    "overflow": {"scale": "overflow"},
    "groups": {"hvd_options": {"groups": 2}},
}


CLASSIC = {"sparsity": 0.9, "error_feedback": "classic"}


@case(way="ab", optimizer=OPTIMIZERS, kind=KINDS)
def a_second_synchronize_hands_back_the_same_results(way, optimizer, kind):
    """Also by step(), and after clipping and unscaling."""
    if (way, kind) == ("b", "groups"):
        return  # groups are Horovod's
    make = OPTIMIZERS[optimizer]
    expected, first = run_steps(way, make, "clip", **CLASSIC, **KINDS[kind])
    for update, more in (("clip, no skip", 1), ("clip twice", 3), ("mixed", None)):
        model, second = run_steps(way, make, update, **CLASSIC, **KINDS[kind])
        assert torch.equal(flat(model), flat(expected)), update
        assert_replicas_identical(model)
        assert second.stats.steps == first.stats.steps == 8
        assert second.describe()["step"] == 8 - first.stats.refused_steps == (7 if kind == "overflow" else 8)
        assert np.isclose(second.residual_norm, first.residual_norm, rtol=1e-6)
        placeholders = second.stats.total.bytes_sent - first.stats.total.bytes_sent
        if more and kind != "overflow":
            assert placeholders == (8 * more * 8 * 4 if way == "a" else 0), placeholders
        second.close()


@case(way="ab", passes=(1, 2))
def gradients_may_be_taken_out_after_synchronize(way, passes):
    """A layer that is not to move yet: its ``.grad`` is removed, and step() averages what is left no second time."""
    models = []
    for kind in ("dense", way):
        model = make_model()
        options = {} if kind == "dense" else EXACT
        given = {"backward_passes_per_step": passes}
        optimizer, compression = distribute(kind, model, sgd(model, momentum=0.0), given, **options)
        for step in range(6):
            optimizer.zero_grad()
            for i in range(passes):
                loss_of(model, step * passes + i).backward()
            optimizer.synchronize()
            if step < 3:
                model.last.zero_grad(set_to_none=True)
            quiet(optimizer.step)
        models.append(model)
        assert compression is None or compression.describe()["step"] == 6
        close(compression)
    assert worst_difference(*models) <= 1e-5


def scale(parameters):
    for p in parameters:
        p.grad.mul_(0.5)


def remove(parameters):
    for p in parameters[-2:]:
        p.grad = None


CHANGES = {"scale": scale, "remove": remove}


@case("mpirun", "gloo", way="ab", change=CHANGES)
def changing_averaged_gradients_on_one_rank_alone_is_an_error(way, change):
    """Dense training averages them again in step(); here the replicas would drift apart."""
    model = make_model()
    optimizer, _ = wrap(way, model, sgd(model), sparsity=0.99)
    loss_of(model, 0).backward()
    optimizer.synchronize()
    if hvd.rank() == 1:
        CHANGES[change]([p for p in model.parameters() if p.requires_grad])
    before = flat(model).clone()
    on_every_rank(dgc.ConfigError, "in different ways", lambda: quiet(optimizer.step))
    assert torch.equal(flat(model), before)


@case(way="ab")
def changes_are_compared_in_each_step_that_hands_back_results(way):
    """Dgc's optimizer compares them each time, Horovod's once in a step."""
    model = make_model()
    optimizer, _ = wrap(way, model, sgd(model), sparsity=0.99)
    trained = [p for p in model.parameters() if p.requires_grad]
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        if step == 0 or way == "b":
            scale(trained)
            optimizer.synchronize()
        if step == 0:
            quiet(optimizer.step)
    if hvd.rank() == 1:
        scale(trained)
    before = flat(model).clone()
    on_every_rank(dgc.ConfigError, "in different ways", lambda: quiet(optimizer.step))
    assert torch.equal(flat(model), before)


@case
def gradients_that_a_script_sets_after_a_step_that_it_left_out_are_averaged():
    models = []
    for kind in ("dense", "b"):
        model = make_model()
        options = {} if kind == "dense" else EXACT
        optimizer, compression = distribute(kind, model, sgd(model, momentum=0.0), **options)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.synchronize()
            if step == 1:
                optimizer.zero_grad()
                for p in model.parameters():
                    p.grad = torch.full_like(p, 0.1 * (1 + hvd.rank())) if p.requires_grad else None
            quiet(optimizer.step)
        assert_replicas_identical(model)
        models.append(model)
        close(compression)
    assert worst_difference(*models) <= 1e-5


@case
def a_rank_without_a_batch_takes_part_after_a_step_that_the_script_left_out():
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model), sparsity=0.9)
    for step in range(3):
        optimizer.zero_grad()
        if step != 1 or hvd.rank() == 0:
            loss_of(model, step).backward()
        if step == 0:
            optimizer.synchronize()
            optimizer.zero_grad()
        else:
            optimizer.step()
    assert compression.describe()["step"] == 3
    assert_replicas_identical(model)


@case
def a_gradient_that_was_taken_out_after_synchronize_leaves_its_parameter_alone():
    """AdamW would decay a parameter whose gradient is 0."""
    model = make_model()
    optimizer, _ = wrap("b", model, torch.optim.AdamW(model.parameters(), lr=0.01), sparsity=0.9)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        model.last.weight.grad = None
        before = model.last.weight.detach().clone()
        quiet(optimizer.step)
        assert model.last.weight.grad is None
        assert torch.equal(model.last.weight, before)


@case
def a_rank_whose_gradients_and_learning_rate_are_0_takes_part():
    """A warm-up may begin at 0, and a rank may have no batch. The other ranks wait for it."""
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model, lr=0.0), sparsity=0.9)
    for step in range(2):
        optimizer.zero_grad()
        if hvd.rank() == 1:
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.requires_grad else None
        else:
            loss_of(model, step).backward()
        optimizer.step()
    assert compression.describe()["step"] == 2


@case
def an_accumulated_gradient_is_not_applied_before_it_is_averaged():
    model = make_model()
    optimizer, _ = wrap("b", model, sgd(model), hvd_options={"backward_passes_per_step": 2}, **EXACT)
    loss_of(model, 0).backward()

    def step():
        with optimizer.skip_synchronize():
            optimizer.step()

    on_every_rank(DGCError, r"call optimizer.synchronize\(\) first", step)
    assert_replicas_identical(model)


@case(dropped=(False, True))
def results_that_are_cleared_before_step_are_told_on_rank_0(dropped):
    model = make_model()
    optimizer, _ = wrap("b", model, sgd(model), **CLASSIC)

    def training():
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.synchronize()
            if not dropped:
                with optimizer.skip_synchronize():
                    optimizer.step()
            optimizer.zero_grad()

    assert warned(training, r"no step\(\) has used them") == (dropped and hvd.rank() == 0)
