"""On 2 real ranks: momentum, Nesterov and decay that change in mid-training, by hand or by a schedule."""

import horovod.torch as hvd
import torch
from models import (
    EXACT,
    close,
    dense_reference,
    distribute,
    each_way,
    loss_of,
    make_model,
    on_every_rank,
    quiet,
    raises,
    sgd,
    train,
    worst_difference,
    wrap,
)
from worker_tools import case

import dgc.torch as dgc

OWN = dict(momentum=0.9, nesterov=True, weight_decay=0.01)


def change(group, step):
    """Set by hand, multiplied, or switched off."""
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


PHASES = {"selecting": EXACT, "before the rampup": {"rampup_begin_step": 1000}}


@case(way="ab", phase=PHASES)
def options_that_are_changed_by_hand_are_followed(way, phase):
    models = []
    for kind, options in (("dense", {}), (way, PHASES[phase])):
        model = make_model()
        optimizer, compression = distribute(kind, model, sgd(model, **OWN), **options)
        train(optimizer, model, 16, after=lambda step, o=optimizer: change(o.param_groups[0], step))
        models.append(model)
        close(compression)
    assert worst_difference(*models) <= 1e-5


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=30, base_momentum=0.5, max_momentum=0.95
    )


@case(way="ab", nesterov=(False, True), rampup=(0, 10))
def a_schedule_of_momentum_equals_dense_training(way, nesterov, rampup):
    model = make_model()
    own = dict(momentum=0.9, nesterov=nesterov)
    expected = dense_reference(model, 20, schedule=one_cycle, **own)
    optimizer, _ = wrap(way, model, sgd(model, **own), **EXACT, rampup_begin_step=rampup)
    scheduler = one_cycle(optimizer)
    train(optimizer, model, 20, after=lambda _: scheduler.step())
    assert worst_difference(model, expected) <= 1e-5


@case(way="ab")
def a_scheduler_may_be_made_before_the_wrapping(way):
    model = make_model()
    expected = dense_reference(model, 12, schedule=one_cycle, **OWN)
    optimizer = sgd(model, **OWN)
    scheduler = one_cycle(optimizer)
    optimizer, _ = wrap(way, model, optimizer, **EXACT)
    train(optimizer, model, 12, after=lambda _: quiet(scheduler.step))
    assert worst_difference(model, expected) <= 1e-5


@case(way="ab")
def the_groups_hold_the_users_options_except_during_an_update(way):
    model, seen = make_model(), []
    optimizer, _ = wrap(way, model, sgd(model, **OWN), sparsity=0.9)
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["momentum"]))
    train(optimizer, model, 2)
    assert set(seen) == {0}, seen
    assert {name: optimizer.param_groups[0][name] for name in OWN} == OWN
    bad = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    raises(ZeroDivisionError, "", optimizer.step)
    bad.remove()
    assert {name: optimizer.param_groups[0][name] for name in OWN} == OWN


@case
def momentum_that_differs_between_ranks_in_a_step_is_an_error():
    for _, model, optimizer, _ in each_way(sparsity=0.9):
        train(optimizer, model, 2)
        optimizer.param_groups[0]["momentum"] = 0.5 + 0.1 * hvd.rank()
        match = "'momentum of first.weight' is 0.5 on rank 0 and 0.6 on rank 1.*disagree in step 2"
        on_every_rank(dgc.ConfigError, match, lambda o=optimizer, m=model: train(o, m, 1))


@case(way="ab", momentum=(0.9, 0.0))
def learning_rates_that_drift_apart_are_an_error_before_anything_moves(way, momentum):
    model = make_model()
    optimizer, _ = wrap(way, model, sgd(model, lr=0.1, momentum=momentum))
    train(optimizer, model, 2)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + hvd.rank())
    match = "'lr of group 0' is 0.1 on rank 0 and 0.05 on rank 1.*disagree in step 2 about the learning rate"
    on_every_rank(dgc.ConfigError, match, lambda: train(optimizer, model, 1))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@case(way="ab")
def learning_rates_that_differ_from_the_beginning_are_an_error(way):
    model = make_model()
    optimizer, _ = wrap(way, model, sgd(model, lr=torch.tensor(0.1 + hvd.rank())))
    match = "disagree in step 0 about the learning rate"
    on_every_rank(dgc.ConfigError, match, lambda: train(optimizer, model, 1))
