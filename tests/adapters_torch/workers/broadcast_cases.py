"""Horovod's ``broadcast_optimizer_state()``, which steps the optimizer of a rank that has no state."""

from __future__ import annotations

import copy

import horovod.torch as hvd
import torch
from models import assert_replicas_identical, flat, make_model, on_every_rank, train, wrap
from worker_tools import case, run_cases

import dgc.torch as dgc

LEFT = {"momentum": 0.0, "weight_decay": 0.0}
OPTIMIZERS = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1), {}),
    "SGD that keeps momentum and decay": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1), LEFT),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1), {}),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, lr=1e-3, weight_decay=0.1), {}),
    "ASGD": (lambda p: torch.optim.ASGD(p, lr=0.05, lambd=0.1), {}),
}


def wrapped(way, name, seed=0):
    model = make_model(seed)
    make, options = OPTIMIZERS[name]
    trainable = [p for p in model.parameters() if p.requires_grad]
    return model, *wrap(way, model, make(trainable), sparsity=0.9, **options)


@case
def moves_no_parameter_of_a_rank_that_has_loaded_no_checkpoint():
    """In the order of Horovod's documentation: first the parameters, then the optimizer's state."""
    for way in "ab":
        for name in OPTIMIZERS:
            model, optimizer, compression = wrapped(way, name)
            train(optimizer, model, 3)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            compression.close()
            model, optimizer, _ = wrapped(way, name, seed=5)
            if hvd.rank() == 0:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            before = flat(model)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            assert torch.equal(flat(model), before), (way, name)
            train(optimizer, model, 3, start=3)
            assert_replicas_identical(model, f"{way} {name}")


@case
def replicas_that_differ_by_one_bit_are_refused_before_the_first_update():
    for way in "ab":
        model, optimizer, _ = wrapped(way, "SGD")
        if hvd.rank() == 1:
            with torch.no_grad():
                value = model.left.weight[20, 30]
                model.left.weight[20, 30] = torch.nextafter(value, torch.tensor(9.0))
        before = flat(model)
        wrong = "'left.weight' has other values on rank 1 than on rank 0"
        on_every_rank(dgc.ConfigError, wrong, lambda: train(optimizer, model, 1), way)  # noqa: B023
        assert torch.equal(flat(model), before)


if __name__ == "__main__":
    run_cases()
