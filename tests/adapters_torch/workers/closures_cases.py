"""``step(closure)`` under torchrun, with dgc's optimizer and with DDP's hook."""

from __future__ import annotations

import copy

import torch
from adapters_torch.torchrun_tools import EXACT, assert_close, assert_identical, digest, loss_of, make_model
from torch.nn.parallel import DistributedDataParallel
from worker_tools import case, close_later, run_cases

import dgc.torch as dgc

FRONTS = {"dgc": "dgc's optimizer", "hook": "DDP's hook"}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Run:
    """A model in training, with dgc's optimizer, DDP's hook or neither; ``saved`` is loaded once all is built."""

    def __init__(self, front, make_optimizer=adamw, saved=None, **options):
        self.calls = 0
        self.module = make_model(seed=0 if saved is None else 1)
        self.compression = close_later(dgc.Compression.dgc(**options))
        self.optimizer = make_optimizer(self.module)
        if front != "dgc":
            self.model = DistributedDataParallel(self.module)
            if front == "hook":
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
        self.calls += 1
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


@case(front=FRONTS, begin=(0, 3))
def a_closure_equals_a_backward_pass_before_the_step(front, begin):
    """Also in the steps in which the compressor begins to take the first moment."""
    options = {"sparsity": 0.9, "rampup_begin_step": begin}
    ends = [digest(Run(front, **options).train(range(8), by_closure).module) for by_closure in (False, True)]
    assert ends[0] == ends[1]


@case(front=FRONTS, begin=(0, 3, 6))
def a_run_resumed_by_closures_goes_on_bit_for_bit(front, begin):
    options = {"sparsity": 0.9, "rampup_begin_step": begin}
    straight = Run(front, **options).train(range(5), by_closure=True)
    resumed = Run(front, saved=straight.save(), **options).train(range(5, 10), by_closure=True)
    straight.train(range(5, 10), by_closure=True)
    assert digest(resumed.module) == digest(straight.module)
    assert_identical(resumed.module)


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


@case(front=FRONTS)
def each_call_of_a_closure_is_a_step_and_equals_dense_ddp(front):
    """Of an optimizer that calls it several times."""
    run = Run(front, lbfgs, **EXACT).train(range(4), by_closure=True)
    dense = Run("dense", lbfgs).train(range(4), by_closure=True)
    assert_close(run.module, dense.module)
    assert run.calls == dense.calls > 4
    assert run.compression.stats.steps == run.calls


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
