"""The optimizer's options, which hold 0 while ``step()`` updates the parameters, under torchrun."""

from __future__ import annotations

import pytest
import torch
from adapters_torch.torchrun_tools import assert_identical, digest, loss_of, make_model
from torch.nn.parallel import DistributedDataParallel
from worker_tools import case, close_later, run_cases

import dgc.torch as dgc

FRONTS = {"dgc": "dgc's optimizer", "hook": "DDP's hook"}
METHODS = {"step": "the optimizer's", "fuse_step": "dgc's"}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


class Run:
    """A model, its optimizer and compressor after two steps."""

    def __init__(self, front, name):
        module = make_model()
        self.compression = close_later(dgc.Compression.dgc(sparsity=0.9))
        self.optimizer = OPTIMIZERS[name](module.parameters())
        if front == "hook":
            self.model = DistributedDataParallel(module)
            dgc.ddp.register(self.model, self.optimizer, self.compression)
        else:
            named, self.model = module.named_parameters(), module
            self.optimizer = dgc.DistributedOptimizer(self.optimizer, named, compression=self.compression)
        self.own = self.options()
        self.train(range(2))

    def train(self, steps, *closure):
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.model, step).backward()
            self.optimizer.step(*closure)

    def fail_in_step(self, register):
        """An exception of the script's in the middle of a step, from which it goes on."""
        hook = register(fail)
        with pytest.raises(ZeroDivisionError):
            self.train(range(2, 3))
        hook.remove()

    def options(self):
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]


def fail(*_):
    raise ZeroDivisionError("of the script")


@case(front=FRONTS, name=OPTIMIZERS)
def the_closure_of_a_step_sees_the_users_own(front, name):
    run, seen = Run(front, name), []
    run.train(range(2, 4), lambda: seen.append(run.options()))
    assert seen == [run.own] * 2


@case(front=FRONTS, name=OPTIMIZERS, method=METHODS)
def after_an_exception_in_step_they_are_the_users_own_and_training_goes_on(front, name, method):
    run = Run(front, name)
    if method == "fuse_step":
        run.optimizer.step = dgc.fuse_optimizer(run.optimizer).fuse_step
    for register in (run.optimizer.register_step_pre_hook, run.optimizer.register_step_post_hook):
        run.fail_in_step(register)
        assert run.options() == run.own
        run.train(range(3, 6))
        assert run.options() == run.own
        assert_identical(run.model)


@case(front=FRONTS, name=OPTIMIZERS)
def a_closure_is_exchanged_after_an_exception_in_step(front, name):
    run = Run(front, name)

    def closure():
        run.optimizer.zero_grad()
        loss = loss_of(run.model, 3)
        loss.backward()
        return loss

    for register in (run.optimizer.register_step_pre_hook, run.optimizer.register_step_post_hook):
        run.fail_in_step(register)
        run.optimizer.zero_grad()
        for _ in range(2):
            run.optimizer.step(closure)
        assert_identical(run.model)


@case(front=FRONTS, name=OPTIMIZERS)
def a_state_that_a_hook_saves_in_step_leaves_them_hidden(front, name):
    """Momentum would be applied twice."""
    saving, plain = Run(front, name), Run(front, name)
    saving.optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.state_dict() and None)
    for run in (saving, plain):
        run.train(range(2, 5))
    assert digest(saving.model) == digest(plain.model)


@case(front=FRONTS, name=OPTIMIZERS)
def after_an_exception_in_a_closure_they_are_the_users_own(front, name):
    run = Run(front, name)
    run.model.zero_grad()
    with pytest.raises(ZeroDivisionError):
        run.optimizer.step(fail)
    assert run.options() == run.own


if __name__ == "__main__":
    run_cases()
