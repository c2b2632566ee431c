"""The optimizer's options, which hold 0 while ``step()`` updates the parameters, under torchrun."""

from __future__ import annotations

import pytest
import torch
from adapters_torch.torchrun_tools import assert_identical, loss_of, make_model
from torch.nn.parallel import DistributedDataParallel
from worker_tools import case, close_later, run_cases

import dgc.torch as dgc

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

    def options(self):
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]


def each_run():
    for front in ("dgc", "hook"):
        for name in OPTIMIZERS:
            yield Run(front, name)


def fail(*_):
    raise ZeroDivisionError("of the script")


def fail_in_step(run, register):
    """An exception of the script's in the middle of a step, from which it goes on."""
    hook = register(fail)
    with pytest.raises(ZeroDivisionError):
        run.train(range(2, 3))
    hook.remove()


@case
def the_closure_of_a_step_sees_the_users_own():
    for run in each_run():
        seen = []
        run.train(range(2, 4), lambda run=run, seen=seen: seen.append(run.options()))
        assert seen == [run.own] * 2


@case
def after_an_exception_in_step_they_are_the_users_own():
    for run in each_run():
        for register in (run.optimizer.register_step_pre_hook, run.optimizer.register_step_post_hook):
            fail_in_step(run, register)
            assert run.options() == run.own


@case
def after_an_exception_in_a_closure_they_are_the_users_own():
    for run in each_run():
        run.model.zero_grad()
        with pytest.raises(ZeroDivisionError):
            run.optimizer.step(fail)
        assert run.options() == run.own


@case
def training_goes_on_after_an_exception_in_step():
    for run in each_run():
        for register in (run.optimizer.register_step_pre_hook, run.optimizer.register_step_post_hook):
            fail_in_step(run, register)
            run.train(range(3, 6))
            assert run.options() == run.own
            assert_identical(run.model)


@case
def a_closure_is_exchanged_after_an_exception_in_step():
    for run in each_run():
        for register in (run.optimizer.register_step_pre_hook, run.optimizer.register_step_post_hook):
            fail_in_step(run, register)

            def closure(run=run):
                run.optimizer.zero_grad()
                loss = loss_of(run.model, 3)
                loss.backward()
                return loss

            run.optimizer.zero_grad()
            for _ in range(2):
                run.optimizer.step(closure)
            assert_identical(run.model)


@case
def a_state_that_a_hook_saves_in_step_leaves_them_hidden():
    """Momentum would be applied twice."""
    for saving, plain in zip(each_run(), each_run(), strict=True):
        saving.optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.state_dict() and None)
        for run in (saving, plain):
            run.train(range(2, 5))
        for a, b in zip(saving.model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(a, b)


if __name__ == "__main__":
    run_cases()
