"""``step(closure)`` under torchrun, with dgc's optimizer and with DDP's hook."""

import copy

import torch
import torch.distributed as dist
from adapters_torch.torchrun_tools import EXACT, assert_close, assert_identical, digest
from ddp_tools import Run
from worker_tools import case, warned


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class ClosureRun(Run):
    """Trains by closures, and counts their calls; ``saved`` is loaded once all is built."""

    def __init__(self, front, make_optimizer=adamw, saved=None, **options):
        super().__init__(front, make_optimizer, seed=0 if saved is None else 1, **options)
        self.calls = 0
        for loaded, state in zip((self.module, self.optimizer, self.compression), saved or (), strict=False):
            loaded.load_state_dict(state)

    def save(self):
        self.compression.average(self.optimizer)
        return copy.deepcopy([o.state_dict() for o in (self.module, self.optimizer, self.compression)])

    def backward(self, step):
        self.calls += 1
        return super().backward(step)

    def train_by_closures(self, steps):
        for step in steps:
            assert self.optimizer.step(lambda step=step: self.backward(step)) > 0
        return self


@case(front=("dgc", "hook"), begin=(0, 3))
def a_closure_equals_a_backward_pass_before_the_step(front, begin):
    """Also in the steps in which the compressor begins to take the first moment."""
    options = {"sparsity": 0.9, "rampup_begin_step": begin}
    plain, by_closures = ClosureRun(front, **options), ClosureRun(front, **options)
    assert digest(plain.train(range(8)).module) == digest(by_closures.train_by_closures(range(8)).module)


@case(front=("dgc", "hook"), begin=(0, 3, 6))
def a_run_resumed_by_closures_goes_on_bit_for_bit(front, begin):
    options = {"sparsity": 0.9, "rampup_begin_step": begin}
    straight = ClosureRun(front, **options).train_by_closures(range(5))
    resumed = ClosureRun(front, saved=straight.save(), **options).train_by_closures(range(5, 10))
    straight.train_by_closures(range(5, 10))
    assert digest(resumed.module) == digest(straight.module)
    resumed.compression.average()
    assert_identical(resumed.module)


@case
def a_rank_whose_closure_computes_no_gradient_takes_part():
    """As dense steps do, in which its gradients count as zeros."""
    run = ClosureRun("dgc", sparsity=0.9)

    def closure():
        return torch.zeros(()) if dist.get_rank() == 1 else run.backward(3)

    run.train_by_closures(range(3))
    run.optimizer.zero_grad()
    run.optimizer.step(closure)
    assert run.compression.stats.steps == 4
    run.compression.average()
    assert_identical(run.module)


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


@case(front=("dgc", "hook"))
def each_call_of_a_closure_is_a_step_and_equals_dense_ddp(front):
    """Of an optimizer that calls it several times."""
    run = ClosureRun(front, lbfgs, **EXACT).train_by_closures(range(4))
    dense = ClosureRun("dense", lbfgs).train_by_closures(range(4))
    assert_close(run.module, dense.module)
    assert run.calls == dense.calls > 4
    assert run.compression.stats.steps == run.calls


@case(front=("dgc", "hook"), sparsity=(0.0, 0.9))
def lbfgs_is_told_to_learn_less_and_nothing_is_said_of_its_many_calls(front, sparsity):

    def training():
        ClosureRun(front, lbfgs, **{**EXACT, "sparsity": sparsity}).train_by_closures(range(2))

    assert warned(training, "LBFGS learns far less") == (sparsity > 0 and dist.get_rank() == 0)
    assert not warned(training, "has used them")
