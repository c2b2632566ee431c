"""``step(closure)`` under torchrun, with dgc's optimizer and with DDP's hook."""

from __future__ import annotations

import copy
import itertools

import torch
from adapters_torch.torchrun_tools import EXACT, assert_close, assert_identical, digest, loss_of, make_model
from torch.nn.parallel import DistributedDataParallel
from worker_tools import case, close_later, run_cases

import dgc.torch as dgc

FRONTS = ("dgc", "hook")


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Run:
    """A model in training, with dgc's optimizer or DDP's hook; ``saved`` is loaded once all is built."""

    def __init__(self, front, make_optimizer=adamw, saved=None, **options):
        self.module = make_model(seed=0 if saved is None else 1)
        self.compression = close_later(dgc.Compression.dgc(**options))
        self.optimizer = make_optimizer(self.module)
        if front == "hook":
            self.model = DistributedDataParallel(self.module)
            dgc.ddp.register(self.model, self.optimizer, self.compression)
        else:
            self.model = self.module
            named = self.module.named_parameters()
            self.optimizer = dgc.DistributedOptimizer(self.optimizer, named, compression=self.compression)
        for loaded, state in zip((self.module, self.optimizer, self.compression), saved or (), strict=False):
            loaded.load_state_dict(state)

    def save(self):
        return copy.deepcopy([o.state_dict() for o in (self.module, self.optimizer, self.compression)])

    def backward(self, step):
        self.optimizer.zero_grad()
        loss = loss_of(self.model, step)
        loss.backward()
        return loss

    def train(self, steps, by_closure):
        for step in steps:
            if by_closure:
                assert self.optimizer.step(lambda step=step: self.backward(step)) > 0
            else:
                self.backward(step)
                self.optimizer.step()
        return self


@case
def a_closure_equals_a_backward_pass_before_the_step():
    """Also in the steps in which the compressor begins to take the first moment."""
    for front, begin in itertools.product(FRONTS, (0, 3)):
        options = {"sparsity": 0.9, "rampup_begin_step": begin}
        ends = [digest(Run(front, **options).train(range(8), by_closure).module) for by_closure in (False, True)]
        assert ends[0] == ends[1], (front, begin)


@case
def a_run_resumed_by_closures_goes_on_bit_for_bit():
    for front, begin in itertools.product(FRONTS, (0, 3, 6)):
        options = {"sparsity": 0.9, "rampup_begin_step": begin}
        straight = Run(front, **options).train(range(5), by_closure=True)
        resumed = Run(front, saved=straight.save(), **options).train(range(5, 10), by_closure=True)
        straight.train(range(5, 10), by_closure=True)
        assert digest(resumed.module) == digest(straight.module), (front, begin)
        assert_identical(resumed.module)


@case
def an_optimizer_that_calls_its_closure_several_times_equals_ddp():
    def lbfgs(module):
        return torch.optim.LBFGS(module.parameters(), lr=0.5, max_iter=3)

    dense = DistributedDataParallel(make_model())
    optimizer = lbfgs(dense.module)
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(dense, step)
            loss.backward()
            return loss

        optimizer.step(closure)
    for front in FRONTS:
        run = Run(front, lbfgs, **EXACT)
        assert_close(run.train(range(3), by_closure=True).module, dense.module)
        assert_identical(run.module)


if __name__ == "__main__":
    run_cases()
