"""``synchronize()`` without ``step()``, as people do it, on 2 real ranks, Horovod's and dgc's optimizer."""

from __future__ import annotations

import itertools
import warnings
from functools import partial

import horovod.torch as hvd
import torch
from models import assert_replicas_identical, each_way, flat, loss_of, make_model, on_every_rank, sgd, train, wrap
from worker_tools import case, run_cases

import dgc.torch as dgc

EXACT = dict(sparsity=0.0, momentum_masking=False, values="float32")
SKIPPED = (0, 3, 4)
"""Calls of the loop whose step is left out; the first one among them."""


def gradients_of(model, loss):
    """Before any hook has handed them over: results are written into their memory."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, [p for _, p in named])
    return dict(zip([n for n, _ in named], found, strict=True))


@case
def nothing_is_lost_and_replicas_are_identical():
    """What all ranks' gradients sum to is in the weights and in the residuals of all ranks."""
    for way, model, optimizer, compression in each_way(partial(sgd, momentum=0.0), sparsity=0.99, values="float32"):
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        given = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for call in range(12):
                scale = 50 if call in SKIPPED else 1
                for n, g in gradients_of(model, loss_of(model, call) * scale).items():
                    given[n] += g
                (loss_of(model, call) * scale).backward()
                optimizer.synchronize()
                if call not in SKIPPED:
                    with optimizer.skip_synchronize():
                        optimizer.step()
                optimizer.zero_grad()
        told = [w for w in caught if "not applied by step()" in str(w.message)]
        assert len(told) == 1, [str(w.message) for w in caught]
        assert_replicas_identical(model, f"conserved {way}")
        saved = compression.state_dict()["parameters"]
        checked = 0
        for n, p in model.named_parameters():
            if n not in saved or "v" not in saved[n]:
                continue
            total = hvd.allreduce(given[n], op=hvd.Sum, name=f"given {way} {n}")
            residual = hvd.allreduce(saved[n]["v"], op=hvd.Sum, name=f"v {way} {n}").view_as(p)
            applied = hvd.size() * (start[n] - p.detach()) / 0.1
            torch.testing.assert_close(applied + residual, total, atol=2e-4, rtol=1e-4)
            checked += 1
        assert checked
        assert compression.describe()["step"] == 12


@case
def a_step_counts_whoever_applies_it():
    """The optimizer, another one over the same parameters, or the script, which says so."""

    def by_the_optimizer(optimizer, model, compression):
        with optimizer.skip_synchronize():
            optimizer.step()

    def by_another(optimizer, model, compression):
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    def by_hand(optimizer, model, compression):
        for p in model.parameters():
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-0.1)
        compression.applied()

    for way in "ab":
        results = []
        for apply in (by_the_optimizer, by_another, by_hand):
            model = make_model()
            optimizer, compression = wrap(way, model, sgd(model), sparsity=0.9)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for step in range(5):
                    loss_of(model, step).backward()
                    optimizer.synchronize()
                    apply(optimizer, model, compression)
                    optimizer.zero_grad()
            results.append(flat(model).clone())
            assert compression.describe()["step"] == 5
        assert all(torch.equal(r, results[0]) for r in results), way


@case
def applied_in_the_middle_of_a_step():
    for way, model, optimizer, compression in each_way(sparsity=0.9):
        loss_of(model, 0).backward()
        on_every_rank(dgc.LayoutError, "while a step is under way", compression.applied, way)
        optimizer.step()


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

        on_every_rank(dgc.ConfigError, "cannot take in another gradient", again, f"{way} {options}")
        assert torch.equal(flat(model), before)


@case
def gradients_that_the_model_zeroes_in_place_are_dropped():
    for way, model, optimizer, _ in each_way(sparsity=0.9):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                loss_of(model, step).backward()
                optimizer.synchronize()
                model.zero_grad(set_to_none=False)
        assert sum("compression.applied()" in str(w.message) for w in caught) == 1, [str(w.message) for w in caught]
        assert_replicas_identical(model, f"in place {way}")


@case
def a_refused_step_is_returned_once():
    """A non-finite gradient: refused by the compressor, skipped by the user."""
    for way, model, optimizer, compression in each_way(**EXACT):
        train(optimizer, model, 2)
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
