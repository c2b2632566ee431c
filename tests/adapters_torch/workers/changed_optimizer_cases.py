"""Another optimizer than the one that was bound to DDP's hook steps the model, under torchrun."""

import torch
from adapters_torch.torchrun_tools import EXACT, assert_close, digest, loss_of, make_model, on_every_rank
from torch.nn.parallel import DistributedDataParallel
from worker_tools import case, close_later

import dgc.torch as dgc

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "SGD decay": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "AdamW without beta1": lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.0, 0.99)),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
}
HALF = {"sparsity": 0.5, "min_numel": 64}


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def hooked(first, **options):
    """A DDP model after two steps with the optimizer that was bound."""
    model = DistributedDataParallel(make_model())
    optimizer = OPTIMIZERS[first](model.parameters())
    dgc.ddp.register(model, optimizer, close_later(dgc.Compression.dgc(**options)))
    train(model, optimizer, range(2))
    return model, optimizer


BOUND = {
    "SGD momentum": HALF,
    "SGD momentum, all sent": EXACT,
    "SGD decay": EXACT,
    "AdamW": {**HALF, "error_feedback": "classic"},
    "AdamW, before the selection": {**HALF, "rampup_begin_step": 9, "error_feedback": "classic"},
}
FREE = {
    "SGD": EXACT,
    "SGD momentum": {**EXACT, "momentum": 0.0, "weight_decay": 0.0},
    "AdamW": EXACT,  # nothing is ever selected
    "AdamW without beta1": HALF,
    "Adagrad": EXACT,
}


@case(first=BOUND)
def whose_momentum_decay_or_first_moment_the_compressor_has_cannot_be_replaced(first):
    """Not even before the selection, from which on the compressor has the first moment."""
    model, bound = hooked(first.partition(",")[0], **BOUND[first])
    for make in OPTIMIZERS.values():
        before, other = digest(model), make(model.parameters())
        match = "of the optimizer that was bound.*new DistributedDataParallel"
        on_every_rank(dgc.ConfigError, match, lambda o=other: train(model, o, range(2, 3)))
        assert digest(model) == before
        train(model, bound, range(3, 5))


@case(first=FREE, second=OPTIMIZERS)
def of_which_the_compressor_has_nothing_may_be_replaced_as_in_dense_training(first, second):
    model, _ = hooked(first, **FREE[first])
    dense = DistributedDataParallel(make_model())
    train(dense, OPTIMIZERS[first](dense.parameters()), range(2))
    for each in (model, dense):
        train(each, OPTIMIZERS[second](each.parameters()), range(2, 6))
    if FREE[first] is not HALF:
        assert_close(model, dense)


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer, and moves the parameters back halfway after every second step."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.param_groups, self.steps = optimizer, optimizer.param_groups, 0
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                p.copy_(slow.lerp_(p, 0.5))


@case(wraps_first=(False, True))
def around_the_bound_one_may_step_it(wraps_first):
    def trained(hook):
        model = DistributedDataParallel(make_model())
        bound = OPTIMIZERS["SGD momentum"](model.parameters())
        lookahead = Lookahead(bound)
        if hook:
            given = lookahead if wraps_first else bound
            dgc.ddp.register(model, given, close_later(dgc.Compression.dgc(**EXACT)))
        train(model, lookahead, range(6))
        return model

    assert_close(trained(True), trained(False))


@case
def inside_the_step_of_the_bound_one_is_a_part_of_it():
    """A sharded optimizer steps one more on each rank."""

    def trained(hook):
        model = DistributedDataParallel(make_model())
        optimizer = dgc.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
        if hook:
            dgc.ddp.register(model, optimizer, close_later(dgc.Compression.dgc(**EXACT)))
        train(model, optimizer, range(6))
        return model

    assert_close(trained(True), trained(False))
