"""Optimizers that look at a parameter as a whole must never be shown a concatenation."""

from __future__ import annotations

import pytest
import torch
from adapters_torch.fuse_tools import SHAPES, Twins, fill_grads, fused_counts, make_params

from dgc.torch.fuse import fuse_optimizer

MATRICES = ((4, 3), (5, 5), (2, 7))


class NormScaled(torch.optim.Optimizer):
    """As LARS and LAMB do: the step length depends on the norms of the whole parameter."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] * p.norm() / p.grad.norm())


class MatrixDecay(torch.optim.Optimizer):
    """Decays matrices only, a common habit."""

    def __init__(self, params, lr=0.1, decay=0.1):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                decay = group["decay"] if p.dim() > 1 else 0.0
                p.mul_(1 - decay).sub_(p.grad, alpha=group["lr"])


class NeedsMore(torch.optim.SGD):
    """Cannot be built from its options."""

    def __init__(self, params, model):
        super().__init__(params, lr=0.1)
        self.model = model


class Noisy(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p))


class Signed(torch.optim.Optimizer):
    """Element-wise, with state of its own making."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["beta"])
                p.sub_(mean.sign() * group["lr"])


WHOLE = [
    (NormScaled, {}, SHAPES),
    (MatrixDecay, {}, SHAPES),
    (torch.optim.Adafactor, {}, SHAPES),
    (torch.optim.Muon, {}, MATRICES),
]


@pytest.mark.parametrize(("cls", "options", "shapes"), WHOLE, ids=lambda value: getattr(value, "__name__", None))
def test_optimizers_of_whole_parameters_are_found_out_and_stepped_plainly(cls, options, shapes):
    with pytest.warns(UserWarning, match=f"{cls.__name__} does not treat every element"):
        twins = Twins(cls, options, shapes)
    twins.fused.step = twins.fused.fuse_step
    for _ in range(3):
        twins.step()
        twins.assert_equal()
    assert fused_counts(twins.fused) == (0, 0)


@pytest.mark.filterwarnings("ignore:.*does not treat every element:UserWarning")
def test_their_parameters_are_not_moved():
    params = make_params()
    places = [p.data_ptr() for p in params]
    fuse_optimizer(NormScaled(params))
    assert [p.data_ptr() for p in params] == places


@pytest.mark.parametrize("options", [{}, {"beta": 0.5}])
def test_an_unknown_element_wise_optimizer_is_fused(options, recwarn):
    twins = Twins(Signed, options)
    for _ in range(5):
        twins.step()
        twins.assert_equal()
    assert fused_counts(twins.fused) == (1, len(SHAPES))
    assert not recwarn.list


def test_the_options_of_the_group_decide():
    # Without decay this one is element-wise.
    twins = Twins(MatrixDecay, {"decay": 0.0})
    twins.step()
    twins.assert_equal()
    assert fused_counts(twins.fused) == (1, len(SHAPES))


def test_one_group_of_two_may_be_fused():
    params = make_params()
    with pytest.warns(UserWarning, match="MatrixDecay"):
        optimizer = fuse_optimizer(MatrixDecay([{"params": params[:4]}, {"params": params[4:], "decay": 0.0}]))
    fill_grads(params, seed=0)
    optimizer.fuse_step()
    assert fused_counts(optimizer) == (1, 3)


def test_a_class_that_cannot_be_tried_is_stepped_plainly():
    params = make_params()
    with pytest.warns(UserWarning, match="NeedsMore"):
        optimizer = fuse_optimizer(NeedsMore(params, model=None))
    fill_grads(params, seed=0)
    expected = [p.detach() - 0.1 * p.grad for p in params]
    optimizer.fuse_step()
    for p, value in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), value)


def test_trying_out_leaves_the_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="Noisy"):
        fuse_optimizer(Noisy(make_params()))
    assert torch.equal(torch.rand(4), expected)


def test_lbfgs_gets_its_closure_as_often_as_it_likes():
    def run(fuse):
        params = make_params([(3,), (4,)])
        optimizer = torch.optim.LBFGS(params, lr=0.5, max_iter=5)
        if fuse:
            with pytest.warns(UserWarning, match="LBFGS"):
                fuse_optimizer(optimizer)
        calls = []

        def closure():
            optimizer.zero_grad()
            loss = sum((p**4).sum() for p in params)
            loss.backward()
            calls.append(loss.item())
            return loss

        loss = optimizer.fuse_step(closure) if fuse else optimizer.step(closure)
        return loss.item(), calls, [p.tolist() for p in params]

    assert run(True) == run(False)
    assert len(run(True)[1]) > 1
