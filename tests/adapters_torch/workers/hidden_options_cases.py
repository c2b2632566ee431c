"""The optimizer's options, which hold 0 while ``step()`` updates the parameters, under torchrun."""

import pytest
import torch
from adapters_torch.torchrun_tools import assert_identical, digest
from ddp_tools import Run
from worker_tools import case

import dgc.torch as dgc

OPTIMIZERS = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
}


class Begun(Run):
    """After two steps."""

    def __init__(self, front, name, **options):
        super().__init__(front, OPTIMIZERS[name], sparsity=0.9, **options)
        self.own = self.options()
        self.train(range(2))

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


@case(front=("dgc", "hook"), name=OPTIMIZERS)
def the_closure_of_a_step_sees_the_users_own(front, name):
    run, seen = Begun(front, name), []
    run.train(range(2, 4), lambda: seen.append(run.options()))
    assert seen == [run.own] * 2


@case(front=("dgc", "hook"), name=OPTIMIZERS, method=("step", "fuse_step"))
def after_an_exception_in_step_they_are_the_users_own_and_training_goes_on(front, name, method):
    run = Begun(front, name)
    if method == "fuse_step":
        run.optimizer.step = dgc.fuse_optimizer(run.optimizer).fuse_step
    for register in (run.optimizer.register_step_pre_hook, run.optimizer.register_step_post_hook):
        run.fail_in_step(register)
        assert run.options() == run.own
        run.train(range(3, 6))
        assert run.options() == run.own
        run.compression.average()
        assert_identical(run.model)


@case(front=("dgc", "hook"), name=OPTIMIZERS)
def a_closure_is_exchanged_after_an_exception_in_step(front, name):
    run = Begun(front, name)

    for register in (run.optimizer.register_step_pre_hook, run.optimizer.register_step_post_hook):
        run.fail_in_step(register)
        run.optimizer.zero_grad()
        for _ in range(2):
            run.optimizer.step(lambda: run.backward(3))
        run.compression.average()
        assert_identical(run.model)


@case(front=("dgc", "hook"), name=OPTIMIZERS)
def a_state_that_a_hook_saves_in_step_leaves_them_hidden(front, name):
    """Momentum would be applied twice."""
    saving, plain = Begun(front, name), Begun(front, name)
    saving.optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.state_dict() and None)
    for run in (saving, plain):
        run.train(range(2, 5))
    assert digest(saving.model) == digest(plain.model)


@case(front=("dgc", "hook"), name=OPTIMIZERS)
def an_exception_in_a_closure_ends_the_step(front, name):
    """Inside of it another optimizer may step a part of the parameters, which is refused again afterwards."""
    run = Begun(front, name, error_feedback="classic")
    with pytest.raises(ZeroDivisionError):
        run.optimizer.step(fail)
    assert run.options() == run.own
    with pytest.raises(dgc.ConfigError, match="of the optimizer that was bound"):
        torch.optim.SGD(run.model.parameters(), lr=0.1).step()
