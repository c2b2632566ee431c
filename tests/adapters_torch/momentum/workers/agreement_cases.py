"""On real ranks: what DGCMomentum does when ranks mean different things, and what it refuses on all of them."""

from __future__ import annotations

import copy
import pickle

import horovod.torch as hvd
import torch
from adapters_torch.workers.tensors import assert_bits_equal, assert_replicas_identical, raises, twin
from torch import nn
from worker_tools import case, run_cases

import dgc.torch as dgc
from dgc.adapter.paddle import L1Decay, L2Decay
from dgc.errors import ConfigError, DGCError, LayoutError
from dgc.torch.momentum.optimizer import DGCMomentum


def parameters():
    generator = torch.Generator().manual_seed(4)
    return [nn.Parameter(torch.randn(s, generator=generator)) for s in ((100, 200), (30,))]


def make(own, **options):
    return DGCMomentum(own, **{"learning_rate": 0.1, "momentum": 0.9, "rampup_begin_step": 0, **options})


def train(optimizer, own, step=0):
    for i, p in enumerate(own):
        generator = torch.Generator().manual_seed(1000 * step + 10 * i + hvd.rank())
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


def differs():
    """0 on all ranks but the last."""
    return int(hvd.rank() == hvd.size() - 1)


@case
def arguments_that_differ_are_errors_on_all_ranks():
    own = parameters()
    raises(ConfigError, "learning rate of group 0", lambda: make(own, learning_rate=0.1 + differs()))
    groups = [{"params": own[:1], "lr": 0.1 + differs()}, {"params": own[1:]}]
    raises(ConfigError, "learning rate of group 0", lambda: make(groups))
    kinds = (L1Decay(0.1), L2Decay(0.1))
    raises(ConfigError, "decay of group 0", lambda: make(own, regularization=kinds[differs()]))
    groups = [{"params": own[:1]}, {"params": own[1:], "regularization": kinds[differs()]}]
    raises(ConfigError, "decay of group 1", lambda: make(groups))
    raises(ConfigError, "nesterov", lambda: make(own, use_nesterov=bool(differs())))
    own[0].regularizer = kinds[differs()]
    raises(ConfigError, "regularizer of group0.0", lambda: make(own))
    own[0].regularizer = "l2" if differs() else None
    raises(DGCError, "the regularizer of 'group0.0' is 'l2'", lambda: make(own))


@case
def a_learning_rate_that_changes_on_one_rank_stops_all_before_the_update():
    for transport in ("auto", "horovod"):
        own = parameters()
        optimizer = make([{"params": own[:1]}, {"params": own[1:]}], transport=transport)
        state = optimizer.state_dict()
        train(optimizer, own)
        before = twin(own)
        for rate in (0.1 + 0.001 * differs(), float("nan") if differs() else 0.1):
            optimizer.param_groups[1]["lr"] = rate
            raises(ConfigError, "disagree in step . about the learning rate", lambda: train(optimizer, own, 1))  # noqa: B023
            assert_bits_equal(own, before)
            optimizer.load_state_dict(state)
        for step in range(3):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)  # the same on all ranks
            train(optimizer, own, step)
        assert_replicas_identical(own)
        optimizer.close()


@case
def options_that_one_rank_cannot_read_are_errors_on_all():
    own = parameters()
    optimizer = make(own)
    train(optimizer, own)
    state = optimizer.state_dict()
    for key in ("lr", "momentum"):
        if differs():
            optimizer.param_groups[0][key] = "much"
        raises(ConfigError, "an option of a parameter group: ValueError", lambda: train(optimizer, own, 1))
        optimizer.load_state_dict(state)
    own[1].regularizer = "l2" if differs() else None
    raises(ConfigError, "regularizer is 'l2'", lambda: train(optimizer, own, 1))
    own[1].regularizer = None
    optimizer.load_state_dict(state)
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        train(optimizer, own, step)
    assert_replicas_identical(own)
    optimizer.close()


@case
def states_with_different_learning_rates_are_refused():
    own = parameters()
    optimizer = make(own)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] += differs()
    raises(LayoutError, "learning rate of group 0", lambda: optimizer.load_state_dict(state))
    optimizer.close()


@case
def the_state_is_loaded_under_paddles_name_too():
    own = parameters()
    optimizer = make(own, sparsity=[0.9])
    train(optimizer, own)
    other_own = twin(own)
    other = make(other_own, sparsity=[0.9])
    other.set_dict(optimizer.state_dict())
    for step in (1, 2):
        train(optimizer, own, step)
        train(other, other_own, step)
    assert_bits_equal(other_own, own)
    raises(AssertionError, "groups of", lambda: other.set_dict({"state": {}, "param_groups": []}))
    optimizer.close()
    other.close()


@case
def copies_are_refused_with_advice():
    own = parameters()
    optimizer = make(own)
    for duplicate in (copy.deepcopy, copy.copy, pickle.dumps):
        raises(TypeError, "load_state_dict\\(optimizer.state_dict\\(\\)\\)", lambda: duplicate(optimizer))  # noqa: B023
    train(optimizer, own)
    assert_replicas_identical(own)
    optimizer.close()


@case
def fusing_it_changes_nothing():
    own = parameters()
    other_own = twin(own)
    optimizer, other = make(own, sparsity=[0.9]), make(other_own, sparsity=[0.9])
    dgc.fuse_optimizer(optimizer)
    optimizer.step = optimizer.fuse_step
    for step in range(3):
        train(optimizer, own, step)
        train(other, other_own, step)
    assert_bits_equal(own, other_own)
    raises(TypeError, "load_state_dict", lambda: copy.deepcopy(optimizer))
    raises(ConfigError, "DGCMomentum does not update", lambda: dgc.fuse_optimizer(other, elementwise=True))
    assert not dgc.is_fused_optimizer(other)
    optimizer.close()
    other.close()


if __name__ == "__main__":
    run_cases()
