"""A job of one process."""

import copy

import torch
from adapters_torch.workers.tensors import assert_bits_equal, twin
from torch import nn
from worker_tools import case, close_later, warned

import dgc.torch as dgc


def momentum(p, *arguments, **options):
    optimizer = dgc.DGCMomentum([p], *arguments, rampup_begin_step=2, **options)
    close_later(optimizer.compression)
    return optimizer


@case
def dgcmomentum_trains_dense_with_a_warning():
    own, third, made = nn.Parameter(torch.linspace(-1, 1, 40_000)), nn.Parameter(torch.linspace(-1, 1, 40_000)), []
    (other,) = twin([own])
    plain = torch.optim.SGD([other], 0.1, 0.9, nesterov=True, weight_decay=0.01)
    make = lambda: made.append(momentum(own, 0.1, 0.9, use_nesterov=True, regularization=dgc.L2Decay(0.01)))  # noqa: E731
    assert warned(make, "^DGCMomentum with one process compresses nothing$") == 1
    for step in range(6):
        made[0].zero_grad()
        for p in (own, other):
            p.grad = torch.sin(torch.arange(40_000.0) + step)
        made[0].step()
        plain.step()
    torch.testing.assert_close(own, other, rtol=0, atol=1e-6)
    expected = third.detach() - 0.1 * (1 + 0.01 * third.detach().sign())
    optimizer = momentum(third, 0.1, 0.0, regularization=dgc.L1Decay(0.01))
    optimizer.step(lambda: third.sum().backward())
    torch.testing.assert_close(third.detach(), expected, rtol=0, atol=1e-6)


@case
def dgcmomentum_keeps_the_residuals_of_two_ranks_that_saved():
    optimizer = momentum(nn.Parameter(torch.linspace(-1, 1, 40_000)), 0.1, 0.9)
    optimizer.load_state_dict(optimizer.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    state["compression"]["size"] = 2
    for entry in state["compression"]["parameters"].values():
        entry["u"][...], entry["v"][...] = 2, 1
    assert warned(lambda: optimizer.load_state_dict(state), "the loaded residuals move no parameter") == 1
    (loaded,) = optimizer.state_dict()["compression"]["parameters"].values()
    assert [set(loaded[key].tolist()) for key in "uv"] == [{2.0}, {1.0}]


@case
def a_sharded_optimizer_is_the_plain_one():
    own = [nn.Parameter(torch.ones(5))]
    other = twin(own)
    zero, plain = dgc.ZeroRedundancyOptimizer(own, torch.optim.Adam, lr=0.1), torch.optim.Adam(other, lr=0.1)
    for _ in range(3):
        own[0].grad, other[0].grad = torch.arange(5.0), torch.arange(5.0)
        zero.step()
        plain.step()
    assert_bits_equal(own, other)
    zero.consolidate_state_dict()
    plain.load_state_dict(zero.state_dict())
    assert len(plain.state) == 1
