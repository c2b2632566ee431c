"""Gradients that a step finds where the one before left them, on 2 real ranks: as in dense training, or an error."""

from __future__ import annotations

import horovod.torch as hvd
import torch
from models import flat, loss_of, make_model, on_every_rank, sgd, wrap
from worker_tools import case, run_cases

from dgc.errors import ConfigError

EXACT = dict(sparsity=0.0, momentum_masking=False, values="float32", small="float32")
SPARSE = dict(sparsity=0.99, bucket_bytes=40_000)
VELOCITY = "results with the compressor's momentum or decay"
UNWRITTEN = "give the compressor sparse_updates=False"


def wrapped(way, optimizers=0.9, **options):
    model = make_model(width=128)
    optimizer = sgd(model, momentum=optimizers, lr=0.01)
    if way == "dense":
        return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()), None
    return model, *wrap(way, model, optimizer, **options)


def trained(way, step, steps=6, **options):
    """The parameters after every ``step``, which is given (model, optimizer, number)."""
    model, optimizer, compression = wrapped(way, **options)
    seen = []
    for number in range(steps):
        step(model, optimizer, number)
        seen.append(flat(model).clone())
    if compression is not None:
        compression.close()
    return torch.stack(seen)


def plain(model, optimizer, number):
    optimizer.zero_grad()
    loss_of(model, number).backward()
    optimizer.step()


def twice(model, optimizer, number):
    plain(model, optimizer, number)
    if number >= 2:
        optimizer.step()


def never_cleared(model, optimizer, number):
    loss_of(model, number).backward()
    optimizer.step()


def twice_cleared_between(model, optimizer, number):
    plain(model, optimizer, number)
    optimizer.zero_grad()
    optimizer.step()


def zeroed_through_data(model, optimizer, number):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.zero_()
    never_cleared(model, optimizer, number)


def set_by_hand(model, optimizer, number):
    """Gradients of one's own making in the place of a backward pass; through ``.data``, whose version nobody counts."""
    if number == 0:
        plain(model, optimizer, number)
        return
    for i, p in enumerate(p for p in model.parameters() if p.requires_grad):
        p.grad.data.copy_(torch.full_like(p, 0.01 * (number + i)))
    optimizer.step()


def require_dense(step):
    for momentum, own in ((0.0, {}), (0.9, {"momentum": 0})):
        expected = trained("dense", step, optimizers=momentum)
        for way in "ab":
            actual = trained(way, step, optimizers=momentum, **EXACT, **own)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@case
def what_is_found_again_is_applied_again():
    for step in (twice, never_cleared, set_by_hand):
        require_dense(step)


def require_error(way, match, again, steps=1, **options):
    """``again`` after some plain steps must be an error on both ranks that has not moved anything."""
    model, optimizer, compression = wrapped(way, **options)
    for number in range(steps):
        plain(model, optimizer, number)
    before = flat(model).clone()
    on_every_rank(ConfigError, match, lambda: again(model, optimizer), f"{way} {match} {again.__name__}")
    assert torch.equal(flat(model), before)
    compression.reset()
    if way == "a":  # Horovod's own optimizer, which cannot take back what it has begun
        on_every_rank(ConfigError, "build model, optimizer", lambda: plain(model, optimizer, steps), again.__name__)
        return
    plain(model, optimizer, steps)
    assert not torch.equal(flat(model), before)


def step_again(model, optimizer):
    optimizer.step()


def step_again_on_rank_0(model, optimizer):
    """The other rank has gradients."""
    if hvd.rank() != 0:
        optimizer.zero_grad()
        loss_of(model, 7).backward()
    optimizer.step()


@case
def a_velocity_is_never_taken_for_a_gradient():
    for way in "ab":
        for again in (step_again, step_again_on_rank_0):
            require_error(way, VELOCITY, again, **EXACT)


@case
def a_backward_pass_after_step_adds_to_no_velocity():
    def backward_again(model, optimizer):
        loss_of(model, 1).backward()
        optimizer.step()

    for way in "ab":
        require_error(way, VELOCITY, backward_again, **EXACT)


@case
def nor_in_a_model_of_one_parameter():
    model = torch.nn.Linear(16, 16, bias=False)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer, compression = wrap("b", model, sgd(model), **EXACT)
    for number in range(3):
        optimizer.zero_grad(set_to_none=number == 1)  # both ways of clearing are right
        model(torch.ones(2, 16)).square().sum().backward()
        optimizer.step()
    before = flat(model).clone()
    on_every_rank(ConfigError, VELOCITY, lambda: model(torch.ones(2, 16)).sum().backward())
    assert torch.equal(flat(model), before)
    compression.close()


@case
def entries_that_were_not_written_cannot_be_found_again():
    for way in "ab":
        require_error(way, UNWRITTEN, step_again, steps=4, optimizers=0.0, **SPARSE)
        require_error(way, VELOCITY, step_again, steps=4, **SPARSE)


@case
def gradients_written_by_hand_into_results_are_an_error():
    """In the place of a backward pass, they cannot be told from the results; new tensors can."""
    for way in "ab":
        require_error(way, VELOCITY, lambda model, optimizer: set_by_hand(model, optimizer, 1), **EXACT)


@case
def what_was_cleared_is_no_error():
    for step in (twice_cleared_between, zeroed_through_data):
        for way in "ab":
            expected = trained(way, step, sparse_updates=False, **SPARSE)
            assert torch.equal(trained(way, step, **SPARSE), expected)


if __name__ == "__main__":
    run_cases()
