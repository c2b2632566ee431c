"""On 2 real ranks: optimizers with a ``step()`` of the user's own, which may do anything with gradients."""

import warnings

import horovod.torch as hvd
import pytest
import torch
from models import EXACT, dense_reference, make_model, train, worst_difference, wrap
from worker_tools import case


class Normalised(torch.optim.SGD):
    """Gives every gradient the norm 1 before the update, much as LARS does."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad /= p.grad.norm() + 1e-9
        return super().step(closure)


class Collecting(torch.optim.SGD):
    """Changes gradients where SGD collects them."""

    def _init_group(self, group, params, grads, *others):
        found = super()._init_group(group, params, grads, *others)
        grads[:] = [g / (g.norm() + 1e-9) for g in grads]
        return found


class Counting(torch.optim.SGD):
    """Leaves gradients and momentum to SGD."""

    def step(self, closure=None):
        self.decays = [group["weight_decay"] for group in self.param_groups]
        return super().step(closure)


CLASSES = {"Normalised": Normalised, "Collecting": Collecting}


@case(way="ab", name=CLASSES)
def it_keeps_its_momentum_and_decay_and_says_so(way, name):
    kind, options = CLASSES[name], dict(lr=0.02, momentum=0.9, weight_decay=0.05)
    dense, model = make_model(), make_model()
    optimizer = kind(dense.parameters(), **options)
    train(hvd.DistributedOptimizer(optimizer, named_parameters=dense.named_parameters()), dense, 10)
    with pytest.warns(RuntimeWarning, match=r"has a step\(\) of its own: its momentum stays in it"):
        optimizer, _ = wrap(way, model, kind(model.parameters(), **options), **EXACT)
    train(optimizer, model, 10)
    assert worst_difference(model, dense) <= 1e-5
    assert all(optimizer.state[p]["momentum_buffer"].any() for p in model.parameters() if p.requires_grad)


@case(way="ab")
def the_advice_of_that_warning_is_momentum_sgd_with_decay(way):
    model = make_model()
    expected = dense_reference(model, 10, momentum=0.9, weight_decay=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = Counting(model.parameters(), lr=0.1)
        optimizer, _ = wrap(way, model, plain, momentum=0.9, weight_decay=0.05, **EXACT)
        train(optimizer, model, 10)
    assert worst_difference(model, expected) <= 1e-5


@case(way="ab")
def decay_that_stays_outside_of_the_compressors_momentum_is_told(way):
    model = make_model()
    plain = Counting(model.parameters(), lr=0.1, weight_decay=0.05)
    with pytest.warns(RuntimeWarning, match="its weight decay stays in it, outside of the momentum"):
        optimizer, _ = wrap(way, model, plain, momentum=0.9, **EXACT)
    train(optimizer, model, 2)
    assert optimizer.decays == [0.05], "it is the step's"


def of_torch(self, closure=None):
    return torch.optim.SGD.step(self, closure)


def by_hand(self, closure=None):
    with torch.no_grad():
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p -= 0.1 * p.grad


REPLACEMENTS = {"of torch": of_torch, "by hand": by_hand}


@case(replacement=REPLACEMENTS)
def a_step_that_replaced_that_of_its_class_is_exchanged_for_too(replacement):
    class Replaced(torch.optim.SGD):
        pass

    model = make_model()
    expected = dense_reference(model, 3)
    optimizer = Replaced(model.parameters(), lr=0.1)
    Replaced.step = REPLACEMENTS[replacement]
    optimizer, _ = wrap("b", model, optimizer, **EXACT)
    train(optimizer, model, 3)
    assert worst_difference(model, expected) <= 1e-5
