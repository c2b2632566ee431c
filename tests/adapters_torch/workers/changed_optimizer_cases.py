"""Another optimizer than the one that was bound to DDP's hook steps the model, under torchrun."""

import torch
from adapters_torch.torchrun_tools import EXACT, assert_close, digest, make_model, on_every_rank
from ddp_tools import LEFT, dense, hooked, train
from worker_tools import case, close_later

import dgc.torch as dgc

OPTIMIZERS = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "SGD momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "SGD decay": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, weight_decay=0.01),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
    "AdamW without beta1": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, betas=(0.0, 0.99)),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-3),
}
HALF = {"sparsity": 0.5, "min_numel": 64}
BOUND = {
    "SGD momentum": HALF,
    "SGD momentum, all sent": EXACT,
    "SGD decay": EXACT,
    "AdamW": {**HALF, "error_feedback": "classic"},
    "AdamW, before the selection": {**HALF, "rampup_begin_step": 9, "error_feedback": "classic"},
}
FREE = {
    "SGD": EXACT,
    "SGD momentum": LEFT,
    "AdamW": EXACT,  # nothing is ever selected
    "AdamW without beta1": HALF,
    "Adagrad": EXACT,
}


@case(first=BOUND)
def whose_momentum_decay_or_first_moment_the_compressor_has_cannot_be_replaced(first):
    """Not even before the selection, from which on the compressor has the first moment."""
    model, bound, _ = hooked(make_model(), OPTIMIZERS[first.partition(",")[0]], BOUND[first])
    train(model, bound, 2)
    for make in OPTIMIZERS.values():
        before, other = digest(model), make(model)
        match = "of the optimizer that was bound.*new DistributedDataParallel"
        on_every_rank(dgc.ConfigError, match, lambda o=other: train(model, o, 1, start=2))
        assert digest(model) == before
        train(model, bound, 2, start=3)


@case(first=FREE, second=OPTIMIZERS)
def of_which_the_compressor_has_nothing_may_be_replaced_as_in_dense_training(first, second):
    model, bound, _ = hooked(make_model(), OPTIMIZERS[first], FREE[first])
    expected, plain = dense(make_model(), OPTIMIZERS[first])
    for each, optimizer in ((model, bound), (expected, plain)):
        train(each, optimizer, 2)
        train(each, OPTIMIZERS[second](each), 4, start=2)
    if FREE[first] is not HALF:
        assert_close(model, expected)


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
        model, bound = dense(make_model(), OPTIMIZERS["SGD momentum"])
        lookahead = Lookahead(bound)
        if hook:
            given = lookahead if wraps_first else bound
            dgc.ddp.register(model, given, close_later(dgc.Compression.dgc(**EXACT)))
        train(model, lookahead, 6)
        return model

    assert_close(trained(True), trained(False))


@case
def inside_the_step_of_the_bound_one_is_a_part_of_it():
    """A sharded optimizer steps one more on each rank."""

    def sharded(model):
        return dgc.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)

    model, optimizer, _ = hooked(make_model(), sharded)
    expected, plain = dense(make_model(), sharded)
    train(model, optimizer, 6)
    train(expected, plain, 6)
    assert_close(model, expected)
