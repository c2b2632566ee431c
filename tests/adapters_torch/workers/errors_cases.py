"""A step that an error or an exception ends, on 2 real ranks: all ranks hear of it, and go on after a reset."""

import contextlib

import horovod.torch as hvd
import torch
from models import assert_replicas_identical, flat, loss_of, make_model, on_every_rank, sgd, train, wrap
from worker_tools import case

import dgc.torch as dgc


def backward(optimizer, model, step):
    optimizer.zero_grad()
    loss_of(model, step).backward()


@case(way="ab")
def a_state_that_is_refused_between_backward_and_step_ends_the_step(way):
    model = make_model()
    optimizer, compression = wrap(way, model, sgd(model), sparsity=0.9)
    train(optimizer, model, 2)
    compression.average(optimizer)
    good, before = compression.state_dict(), flat(model)
    bad = {**good, "parameters": {"other": next(iter(good["parameters"].values()))}}
    backward(optimizer, model, 2)
    hvd.allreduce(torch.zeros(1), name="all have handed over")
    on_every_rank(dgc.LayoutError, "", lambda: compression.load_state_dict(bad))
    on_every_rank(dgc.RemoteError, "was given up by .* call reset", optimizer.step)
    assert torch.equal(flat(model), before)
    compression.load_state_dict(good)
    if way == "b":
        train(optimizer, model, 2, start=2)
        assert_replicas_identical(model)


@case
def a_step_that_one_rank_gives_up_is_one_that_all_give_up():
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model), sparsity=0.9)
    train(optimizer, model, 1)
    backward(optimizer, model, 1)
    if hvd.rank() != 0:
        with contextlib.suppress(dgc.DGCError):  # the message of rank 0 may be out already
            optimizer.step()
    compression.reset()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = flat(model).clone()
    train(optimizer, model, 2)
    assert not torch.equal(flat(model), before)
    assert_replicas_identical(model)


@case
def an_exchange_without_a_backward_pass_that_fails_leaves_nothing_behind():
    """Rank 0 fails in the exchange of zeros. In the next step only one parameter has a gradient."""
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model), sparsity=0.9)
    train(optimizer, model, 2)
    optimizer.zero_grad()

    def failing():
        if hvd.rank() == 0:
            compression.engine.fail(dgc.LayoutError("made to fail"))
        optimizer.synchronize()

    on_every_rank(dgc.DGCError, "made to fail", failing)
    compression.reset()
    optimizer.zero_grad()
    next(model.parameters()).sum().backward()
    optimizer.step()
    assert_replicas_identical(model)


@case(failing=("0", "1", "01"))
def after_an_exception_between_backward_and_step_horovods_optimizer_goes_on_on_all_ranks_or_none(failing):
    """On one rank alone, while the other makes the update, and on all: these go on together, or not, by chance."""

    def outcome():
        try:
            train(optimizer, model, 2, start=3)
        except dgc.ConfigError as error:
            return str(error)
        return "goes on"

    model = make_model()
    optimizer, compression = wrap("a", model, sgd(model), sparsity=0.9)
    train(optimizer, model, 2)
    backward(optimizer, model, 2)
    if str(hvd.rank()) not in failing:
        optimizer.step()
    hvd.allreduce(torch.zeros(1), name="together")  # the others have made their update
    compression.reset()
    outcomes = hvd.allgather_object(outcome(), name="outcomes")
    assert len(set(outcomes)) == 1, outcomes
    if len(failing) == 1:
        assert "do not train the same model" in outcomes[0], outcomes
    elif outcomes[0] == "goes on":
        assert_replicas_identical(model)
    else:
        assert "cannot take back" in outcomes[0], outcomes
