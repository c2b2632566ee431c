"""Optimizers found among the callers."""

import torch

from dgc.torch.engine.step.callers import frames, stepping


class Looking(torch.optim.SGD):
    def step(self, closure=None):
        self.seen = look()


def look():
    return [found for found in map(stepping, frames()) if found is not None]


def test_the_optimizer_that_steps_is_found():
    optimizer = Looking([torch.zeros(1, requires_grad=True)], lr=0.1)
    optimizer.step()
    assert optimizer.seen == [optimizer]
    assert look() == []


def test_only_so_many_callers_are_looked_at():
    def named_like_a_caller():
        return [frame.f_code.co_name for frame in frames(2)]

    assert named_like_a_caller()[0] == "test_only_so_many_callers_are_looked_at"
    assert len(named_like_a_caller()) == 2


def test_something_else_with_a_step_is_none():
    class Scheduler:
        def step(self):
            return look()

    assert Scheduler().step() == []
