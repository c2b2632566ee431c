"""DDP's communication hook in DDP itself, Accelerate, the Trainer, Lightning and Fabric: examples on 2 ranks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import torch
from adapters_torch.torchrun_tools import EXACT, assert_close, assert_identical
from worker_tools import case, run_cases

import dgc.torch as dgc

STEPS = 28  # of an epoch


def check(train, **arguments):
    """The hook is called in each step; dense at sparsity 0, identical replicas at 0.99."""
    steps = STEPS // arguments.get("accumulate", 1)
    torch.manual_seed(7)
    dense = train(None, epochs=1, **arguments)
    exact, sparse = dgc.Compression.dgc(**EXACT), dgc.Compression.dgc(sparsity=0.99)
    torch.manual_seed(7)
    model = train(exact, epochs=1, **arguments)
    assert exact.stats.steps == steps
    assert_close(model, dense)
    exact.close()
    model = train(sparse, epochs=1, **arguments)
    assert sparse.stats.steps == steps
    assert sparse.stats.last.ratio > 20
    assert_identical(model)
    sparse.close()


@case
def ddp():
    import ddp_digits

    check(ddp_digits.train)


@case
def accelerate():
    import accelerate_digits

    check(accelerate_digits.train)
    check(accelerate_digits.train, accumulate=2)


@case
def trainer():
    import trainer_digits

    check(trainer_digits.train)


@case
def lightning():
    import lightning_digits

    check(lightning_digits.train)


@case
def fabric():
    import fabric_digits

    check(fabric_digits.train)
    check(fabric_digits.train, accumulate=4)


if __name__ == "__main__":
    run_cases()
