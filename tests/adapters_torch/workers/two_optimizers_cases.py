"""Several optimizers over the same parameters, on 2 real ranks: one of them exchanges."""

import copy
import pickle

import pytest
import torch
from models import EXACT, dense_reference, flat, loss_of, make_model, on_every_rank, sgd, train, worst_difference, wrap
from worker_tools import case

import dgc.torch as dgc

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "deepcopy of a fused one": lambda o: copy.deepcopy(dgc.fuse_optimizer(o)),
}


@case(way="ab", momentum=(0.9, 0.0))
def one_that_was_not_bound_is_refused_where_the_compressor_has_momentum(way, momentum):
    model = make_model()
    optimizer, _ = wrap(way, model, sgd(model, momentum=momentum), sparsity=0.9)
    train(optimizer, model, 2)
    other = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.8, weight_decay=0.1)
    before = flat(model).clone()
    if momentum:
        on_every_rank(dgc.ConfigError, "of the optimizer that was bound", other.step)
        assert torch.equal(flat(model), before)
    else:
        other.step()
    assert (other.param_groups[0]["momentum"], other.param_groups[0]["weight_decay"]) == (0.8, 0.1)


@case
def one_that_is_wrapped_later_takes_the_place_of_the_first():
    """Which is referred to still, as by a scheduler."""
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


@case(first="ab")
def horovods_own_cannot_be_wrapped_beside_another_one(first):
    model = make_model()
    plain = sgd(model)
    both = [wrap(first, model, plain), wrap("a", model, plain if first == "a" else sgd(model))]
    match = "two distributed optimizers exchange the gradients of one backward pass.*wrap one optimizer, once"
    on_every_rank(dgc.ConfigError, match, lambda: train(both[1][0], model, 1))


@case(how=COPIES)
def a_wrapped_one_cannot_be_copied(how):
    model = make_model()
    optimizer, _ = wrap("b", model, sgd(model), sparsity=0.9)
    train(optimizer, model, 1)
    with pytest.raises(TypeError, match="cannot be copied"):
        COPIES[how](optimizer)
