"""``synchronize()`` without ``step()``, as people do it, on 2 real ranks, Horovod's and dgc's optimizer."""

from __future__ import annotations

import itertools
import warnings
from functools import partial

import horovod.torch as hvd
import torch
from models import (
    assert_replicas_identical,
    batch,
    dense_reference,
    each_way,
    flat,
    loss_of,
    make_model,
    on_every_rank,
    sgd,
    train,
    worst_difference,
    wrap,
)
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
def what_was_applied_is_never_taken_back():
    """By the optimizer, by another one over the same parameters, or by hand."""

    def by_the_optimizer(optimizer, model):
        with optimizer.skip_synchronize():
            optimizer.step()

    def by_another(optimizer, model):
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    def by_hand(optimizer, model):
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.add_(p.grad, alpha=-0.1)

    def by_hand_of_old(optimizer, model):
        for p in model.parameters():
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-0.1)

    for way in "ab":
        results = []
        for apply in (by_the_optimizer, by_another, by_hand, by_hand_of_old):
            model = make_model()
            optimizer, compression = wrap(way, model, sgd(model), sparsity=0.9)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for step in range(5):
                    loss_of(model, step).backward()
                    optimizer.synchronize()
                    apply(optimizer, model)
                    optimizer.zero_grad()
            results.append(flat(model).clone())
            assert compression.describe()["step"] == 5
        assert all(torch.equal(r, results[0]) for r in results), way


@case
def what_a_closure_exchanged_is_applied():
    """The step begins before its gradients are exchanged."""
    for way in "ab":
        model = make_model()
        expected = dense_reference(model, 5, momentum=0.9)
        optimizer, compression = wrap(way, model, sgd(model), **EXACT)
        for step in range(5):

            def closure(step=step, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.synchronize()
                return 0.0

            with optimizer.skip_synchronize():
                optimizer.step(closure)
            optimizer.zero_grad()
        assert worst_difference(model, expected) <= 1e-5, (way, worst_difference(model, expected))
        assert compression.describe()["step"] == 5


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
def gradients_that_stay_are_not_taken_back():
    """Without zero_grad() the averaged gradient is still in ``.grad`` and is exchanged again with the next one."""
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
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = flat(model).clone()

        def again(model=model, optimizer=optimizer):
            loss_of(model, 3).backward()
            optimizer.step()

        on_every_rank(dgc.DGCError, "cannot take in another gradient", again, f"{way} {options}")
        assert torch.equal(flat(model), before)


@case
def where_gradients_may_have_been_zeroed_in_place_a_warning_says_what_would_be_wrong():
    """One parameter, or passes that are added up, hide whether somebody has cleared the gradients before."""
    for way, passes in itertools.product("ab", (1, 2)):
        torch.manual_seed(0)
        model = torch.nn.Linear(20, 10, bias=False) if passes == 1 else torch.nn.Sequential(torch.nn.Linear(20, 10))
        optimizer, _ = wrap(way, model, sgd(model), hvd_options={"backward_passes_per_step": passes})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                for i in range(passes):
                    x, y = batch(10 * step + i)
                    torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.synchronize()
                model.zero_grad(set_to_none=False)
        # The second step finds what the first one left, and gradients in it.
        assert sum("set to 0 in place" in str(w.message) for w in caught) == 1, [str(w.message) for w in caught]


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
