"""Results that a step finds where the one before left them, on 2 real ranks: as in dense training, or an error."""

import horovod.torch as hvd
import torch
from models import (
    assert_replicas_identical,
    batch,
    close,
    distribute,
    flat,
    loss_of,
    make_model,
    on_every_rank,
    sgd,
    train,
    wrap,
)
from worker_tools import case

from dgc.errors import ConfigError, LayoutError

EXACT = dict(sparsity=0.0, momentum_masking=False, values="float32", small="float32")
VELOCITY = "results with the compressor's momentum or decay"


def wrapped(way, optimizers=0.9, **options):
    model = make_model(width=128)
    return model, *distribute(way, model, sgd(model, momentum=optimizers, lr=0.01), **options)


def trained(way, step, **options):
    """The parameters after each of six ``step``, which is given (model, optimizer, number)."""
    model, optimizer, compression = wrapped(way, **options)
    seen = []
    for number in range(6):
        step(model, optimizer, number)
        seen.append(flat(model).clone())
    close(compression)
    return torch.stack(seen)


def plain(model, optimizer, number):
    train(optimizer, model, 1, start=number)


def twice(model, optimizer, number):
    plain(model, optimizer, number)
    if number >= 2:
        optimizer.step()


def never_cleared(model, optimizer, number):
    loss_of(model, number).backward()
    optimizer.step()


def set_by_hand(model, optimizer, number):
    """Gradients of one's own making in the place of a backward pass; through ``.data``, whose version nobody counts."""
    if number == 0:
        plain(model, optimizer, number)
        return
    for i, p in enumerate(p for p in model.parameters() if p.requires_grad):
        p.grad.data.copy_(torch.full_like(p, 0.01 * (number + i)))
    optimizer.step()


def synchronized_without_a_step(model, optimizer, number):
    loss_of(model, number).backward()
    optimizer.synchronize()
    if number % 3 == 2:
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()


MEANS = {
    "twice": twice,
    "never cleared": never_cleared,
    "set by hand": set_by_hand,
    "synchronized": synchronized_without_a_step,
}


@case(way="ab", step=MEANS, momentum=(0.0, 0.9))
def means_that_are_found_again_are_sent_again_as_in_dense_training(way, step, momentum):
    expected = trained("dense", MEANS[step], optimizers=momentum)
    own = {"momentum": 0} if momentum else {}
    torch.testing.assert_close(
        trained(way, MEANS[step], optimizers=momentum, **EXACT, **own), expected, rtol=1e-5, atol=1e-6
    )


def step_again_on_rank_0(model, optimizer):
    """The other rank has gradients."""
    if hvd.rank() != 0:
        optimizer.zero_grad()
        loss_of(model, 7).backward()
    optimizer.step()


def backward_after_synchronize(model, optimizer):
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.synchronize()
    loss_of(model, 3).backward()
    optimizer.step()


def backward_after_step(model, optimizer):
    loss_of(model, 1).backward()
    optimizer.step()


AGAIN = {
    "step": lambda model, optimizer: optimizer.step(),
    "step on rank 0": step_again_on_rank_0,
    "backward": backward_after_step,
    "backward after synchronize": backward_after_synchronize,
    "by hand": lambda model, optimizer: set_by_hand(model, optimizer, 1),
}


@case(way="ab", again=AGAIN)
def a_velocity_is_never_taken_for_a_gradient(way, again):
    model, optimizer, compression = wrapped(way, **EXACT)
    train(optimizer, model, 1)
    before = flat(model).clone()
    on_every_rank(ConfigError, VELOCITY, lambda: AGAIN[again](model, optimizer))
    assert torch.equal(flat(model), before)
    compression.reset()
    if way == "a":  # Horovod's own optimizer, which cannot take back what it has begun
        on_every_rank(ConfigError, "build model, optimizer", lambda: plain(model, optimizer, 1))
        return
    plain(model, optimizer, 1)
    assert not torch.equal(flat(model), before)


@case
def nor_is_that_of_a_model_of_one_parameter():
    model = torch.nn.Linear(16, 16, bias=False)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer, _ = wrap("b", model, sgd(model), **EXACT)
    for number in range(3):
        optimizer.zero_grad(set_to_none=number == 1)  # both ways of clearing are right
        model(torch.ones(2, 16)).square().sum().backward()
        optimizer.step()
    before = flat(model).clone()
    on_every_rank(ConfigError, VELOCITY, lambda: model(torch.ones(2, 16)).sum().backward())
    assert torch.equal(flat(model), before)


@case(way="ab")
def nor_is_a_result_with_decay_alone(way):
    model = make_model()
    optimizer, _ = wrap(way, model, sgd(model, momentum=0.0, weight_decay=0.01), sparsity=0.99)
    train(optimizer, model, 2)
    before = flat(model).clone()
    on_every_rank(ConfigError, VELOCITY, lambda: backward_after_synchronize(model, optimizer))
    assert torch.equal(flat(model), before)


def cleared_between(model, optimizer, number):
    plain(model, optimizer, number)
    optimizer.zero_grad()
    optimizer.step()


def zeroed_through_data(model, optimizer, number):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.zero_()
    never_cleared(model, optimizer, number)


CLEARED = {"zero_grad": cleared_between, "data": zeroed_through_data}


@case(way="ab", step=CLEARED)
def what_was_cleared_is_no_error(way, step):
    assert torch.equal(trained(way, CLEARED[step], **EXACT), trained(way, plain, **EXACT))


@case(way="ab", cast=("double", "bfloat16"))
def a_model_that_is_cast_after_a_step_has_cleared_its_gradients(way, cast):
    """Torch drops Horovod's hooks then, and ``step()`` finds all gradients of the pass at once."""
    model, optimizer, _ = wrapped(way, sparsity=0.9)
    train(optimizer, model, 1)
    getattr(model, cast)()

    def step():
        optimizer.zero_grad()
        x, y = batch(1)
        torch.nn.functional.cross_entropy(model(x.to(model.first.weight.dtype)), y).backward()
        optimizer.step()

    if cast == "double":
        on_every_rank(LayoutError, "before the optimizer is wrapped", step)
    else:
        step()
        step()
        assert_replicas_identical(model)
