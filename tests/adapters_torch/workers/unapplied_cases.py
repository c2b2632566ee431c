"""``synchronize()`` without ``step()``, as people do it, on 2 real ranks, Horovod's and dgc's optimizer."""

from __future__ import annotations

import itertools

import horovod.torch as hvd
import torch
from models import assert_replicas_identical, each_way, flat, loss_of, make_model, on_every_rank, sgd, train, wrap
from worker_tools import case, run_cases

import dgc.torch as dgc

EXACT = dict(sparsity=0.0, momentum_masking=False, values="float32")


@case
def a_closure_that_runs_twice_counts_twice():
    for _, model, optimizer, compression in each_way(sparsity=0.9):

        def closure(model=model, optimizer=optimizer):
            for step in range(2):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.synchronize()
            return 0.0

        with optimizer.skip_synchronize():
            optimizer.step(closure)
        optimizer.zero_grad()
        assert compression.describe()["step"] == 2


@case
def gradients_that_stay_are_sent_again():
    """Without zero_grad() the averaged gradient is still in ``.grad``, as in dense training."""
    for way in "ab":
        model = make_model()
        optimizer, compression = wrap(way, model, sgd(model, momentum=0.0), **EXACT)
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        assert compression.residual_norm < 1e-5
        assert compression.describe()["step"] == 3


@case
def gradients_are_not_added_to_a_velocity():
    """With adopted momentum or decay ``.grad`` is no gradient after synchronize(): an error before anything moves."""
    for way, options in itertools.product("ab", ({"momentum": 0.9}, {"momentum": 0.0, "weight_decay": 0.01})):
        model = make_model()
        optimizer, _ = wrap(way, model, sgd(model, **options), sparsity=0.99)
        train(optimizer, model, 2)
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        optimizer.synchronize()
        before = flat(model).clone()

        def again(model=model, optimizer=optimizer):
            loss_of(model, 3).backward()
            optimizer.step()

        on_every_rank(dgc.ConfigError, "results with the compressor's momentum or decay", again, f"{way} {options}")
        assert torch.equal(flat(model), before)


@case
def a_refused_step_is_returned_once():
    """A non-finite gradient: refused by the compressor, skipped by the user."""
    for way, model, optimizer, compression in each_way(**EXACT):
        train(optimizer, model, 2)
        optimizer.zero_grad()
        (loss_of(model, 2) * (float("nan") if hvd.rank() else 1)).backward()
        optimizer.synchronize()
        assert compression.stats.refused_steps == 1
        before = compression.residual_norm
        optimizer.zero_grad()
        assert compression.residual_norm == before
        train(optimizer, model, 2)
        assert_replicas_identical(model, f"refused {way}")


if __name__ == "__main__":
    run_cases()
