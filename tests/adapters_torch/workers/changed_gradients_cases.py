"""On 2 real ranks: gradients that a script changes before or while they are exchanged."""

import time

import horovod.torch as hvd
import torch
from models import (
    EXACT,
    flat,
    loss_of,
    make_model,
    on_every_rank,
    raises,
    sgd,
    train,
    worst_difference,
    wrap,
)
from worker_tools import case

import dgc.torch as dgc


def clip(model, optimizer, scaler):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def replace(model, optimizer, scaler):
    model.left.weight.grad = model.left.weight.grad / 2
    optimizer.step()


def unscale(model, optimizer, scaler):
    scaler.unscale_(optimizer)
    optimizer.synchronize()


CHANGES = {"clip": clip, "replace": replace, "unscale": unscale}


@case(change=CHANGES)
def a_change_while_gradients_are_exchanged_is_an_error(change):
    """What was read of them before and after is a matter of chance."""
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer, _ = wrap("b", model, sgd(model), sparsity=0.9, loss_scale=scaler if change == "unscale" else 1)
    scaler.scale(loss_of(model, 0)).backward()
    before = flat(model).clone()
    match = "was changed or replaced while it was exchanged"
    on_every_rank(dgc.LayoutError, match, lambda: CHANGES[change](model, optimizer, scaler))
    assert torch.equal(flat(model), before)


@case(way="ab", bucket_bytes=(1, 25_000_000))
def a_change_on_one_rank_is_an_error_also_when_all_buckets_may_be_through(way, bucket_bytes):
    model = make_model()
    optimizer, compression = wrap(way, model, sgd(model), sparsity=0.9, bucket_bytes=bucket_bytes)
    train(optimizer, model, 2)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    time.sleep(1.0)
    if hvd.rank() == 1:
        model.last.weight.grad.mul_(2.0)
    changed = dgc.LayoutError, "last.weight.* was changed or replaced"
    if way == "b":
        on_every_rank(*changed, optimizer.step)
    elif hvd.rank() == 1:
        raises(*changed, optimizer.step)
    else:  # has what it waits for, and hears of an error in the next step
        optimizer.step()
    compression.reset()
    optimizer.zero_grad()
    if way == "b":
        train(optimizer, model, 2)
    else:  # one rank has made a step that another has not
        on_every_rank(dgc.ConfigError, "do not train the same model", lambda: train(optimizer, model, 1))


def halve(p):
    p.grad.mul_(0.5)


@case
def a_hook_may_change_gradients_if_it_was_there_before_the_wrapping():
    model, expected = make_model(), make_model()
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(halve)
    optimizer, _ = wrap("b", model, sgd(model), **EXACT)
    train(optimizer, model, 3)
    dense = hvd.DistributedOptimizer(sgd(expected), named_parameters=expected.named_parameters())
    for step in range(3):
        dense.zero_grad()
        (loss_of(expected, step) / 2).backward()
        dense.step()
    assert worst_difference(model, expected) <= 1e-5
