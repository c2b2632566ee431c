"""``synchronize()`` without ``step()``, as people do it, on 2 real ranks, Horovod's and dgc's optimizer."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import OrderedDict
from functools import partial

import horovod.torch as hvd
import numpy as np
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
    worst_difference,
    wrap,
)
from worker_tools import case, run_cases

import dgc.torch as dgc

EXACT = dict(sparsity=0.0, momentum_masking=False, values="float32")
SKIPPED = (0, 3, 4)
"""Calls of the loop whose step is left out; the first one among them."""


def optimizer_clears(optimizer, model, compression):
    optimizer.zero_grad()


def model_clears(optimizer, model, compression):
    model.zero_grad()


def model_clears_in_place(optimizer, model, compression):
    model.zero_grad(set_to_none=False)


def discards(optimizer, model, compression):
    assert compression.discard_step()
    assert not compression.discard_step()
    model.zero_grad()


WAYS_TO_DROP = [optimizer_clears, model_clears, model_clears_in_place, discards]


def loop(optimizer, model, compression, steps, skipped=SKIPPED, drop=optimizer_clears, spike=50.0):
    """``steps`` updates, with calls in between whose gradients, ``spike`` times as large, are dropped."""
    step = call = 0
    while step < steps:
        spiking = call in skipped
        (loss_of(model, 100 + call if spiking else step) * (spike if spiking else 1)).backward()
        optimizer.synchronize()
        call += 1
        if spiking:
            drop(optimizer, model, compression)
            continue
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        step += 1


def equals_dense(drop, momentum=0.9):
    for way in "ab":
        model = make_model()
        expected = dense_reference(model, 8, momentum=momentum)
        optimizer, compression = wrap(way, model, sgd(model, momentum=momentum), discardable=True, **EXACT)
        loop(optimizer, model, compression, 8, drop=drop)
        assert worst_difference(model, expected) <= 1e-5, (way, worst_difference(model, expected))
        assert_replicas_identical(model, f"{way} {drop.__name__} {momentum}")
        assert compression.describe()["step"] == 8


@case
def a_skipped_spike_equals_dense_after_the_optimizers_zero_grad():
    equals_dense(optimizer_clears)


@case
def a_skipped_spike_equals_dense_without_momentum():
    equals_dense(optimizer_clears, momentum=0.0)


@case
def a_skipped_spike_equals_dense_after_the_models_zero_grad():
    equals_dense(model_clears)


@case
def a_skipped_spike_equals_dense_after_zeroing_in_place():
    equals_dense(model_clears_in_place)


@case
def a_skipped_spike_equals_dense_after_discard_step():
    equals_dense(discards)


@case
def the_optimizers_own_discard_step():
    model = make_model()
    expected = dense_reference(model, 8, momentum=0.9)
    optimizer, compression = wrap("b", model, sgd(model), discardable=True, **EXACT)
    loop(optimizer, model, compression, 8, drop=lambda o, m, c: (o.discard_step(), m.zero_grad()))
    assert worst_difference(model, expected) <= 1e-5


def gradients_of(model, loss):
    """Before any hook has handed them over: results are written into their memory."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, [p for _, p in named])
    return dict(zip([n for n, _ in named], found, strict=True))


def arrays(compression):
    saved = compression.state_dict()
    return {(n, k): a for n, e in saved["parameters"].items() for k, a in e.items()}, saved["step"]


@case
def a_discarded_step_leaves_the_state_bit_for_bit():
    for way, model, optimizer, compression in each_way(
        discardable=True, sparsity=[0.9, 0.99], rampup_step=6, rampup_begin_step=1
    ):
        for _ in range(5):
            loop(optimizer, model, compression, 1, skipped=())
            before, step = arrays(compression)
            loss_of(model, 77).backward()
            optimizer.synchronize()
            assert compression.describe()["step"] == step + 1
            optimizer.zero_grad()
            after, now = arrays(compression)
            assert now == step
            for key, values in before.items():
                torch.testing.assert_close(after[key], values, rtol=0, atol=0, equal_nan=True, msg=f"{way} {key}")


@case
def without_the_option_nothing_is_lost_and_replicas_are_identical():
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
        told = [w for w in caught if "discardable=True" in str(w.message)]
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
def discard_step_without_the_option_says_what_to_do():
    for way, model, optimizer, compression in each_way(sparsity=0.9):
        loss_of(model, 0).backward()
        optimizer.synchronize()
        on_every_rank(dgc.ConfigError, "discardable=True", compression.discard_step, way)


@case
def discard_step_in_the_middle_of_a_step():
    for way, model, optimizer, compression in each_way(sparsity=0.9, discardable=True):
        loss_of(model, 0).backward()
        on_every_rank(dgc.LayoutError, "while a step is under way", compression.discard_step, way)
        optimizer.step()
        assert not compression.discard_step()


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
            optimizer, compression = wrap(way, model, sgd(model), sparsity=0.9, discardable=apply is by_hand)
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
        for discardable in (True, False):
            model = make_model()
            expected = dense_reference(model, 5, momentum=0.9)
            optimizer, compression = wrap(way, model, sgd(model), discardable=discardable, **EXACT)
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
    for _, model, optimizer, compression in each_way(discardable=True, sparsity=0.9):

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
        flats = []
        for discardable in (True, False):
            model = make_model()
            optimizer, compression = wrap(way, model, sgd(model, momentum=0.0), discardable=discardable, **EXACT)
            for step in range(3):
                loss_of(model, step).backward()
                optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
            assert compression.residual_norm < 1e-5
            assert compression.describe()["step"] == 3
            flats.append(flat(model).clone())
        assert torch.equal(*flats), way


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


@case("mpirun", "gloo")
def a_rank_that_discards_alone():
    """One clear error on every rank, also where another step's messages have another size."""
    for way in "ab":
        for how in (optimizer_clears, discards):
            model = make_model()
            optimizer, compression = wrap(
                way, model, sgd(model), discardable=True, sparsity=[0.0, 0.9], rampup_begin_step=3, rampup_step=2
            )
            loop(optimizer, model, compression, 2, skipped=())
            loss_of(model, 2).backward()
            optimizer.synchronize()
            if hvd.rank():
                how(optimizer, model, compression)
            else:
                with optimizer.skip_synchronize():
                    optimizer.step()
                optimizer.zero_grad()

            def next_step(model=model, optimizer=optimizer):
                loss_of(model, 3).backward()
                optimizer.step()

            on_every_rank(
                dgc.ConfigError, "discarded on one rank and applied on another", next_step, f"{way} {how.__name__}"
            )
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            compression.reset()
            optimizer.zero_grad()
            loop(optimizer, model, compression, 2)
            assert_replicas_identical(model, f"after {way} {how.__name__}")


@case("mpirun", "gloo")
def interrupted_between_synchronize_and_step():
    """Somebody stops a notebook there, and runs the cell again."""
    for way in "ab":
        model = make_model()
        expected = dense_reference(model, 6, momentum=0.9)
        optimizer, _ = wrap(way, model, sgd(model), discardable=True, **EXACT)

        def cell(steps, interrupted=None, model=model, optimizer=optimizer):
            for step in steps:
                optimizer.zero_grad()
                loss_of(model, step if step != interrupted else 50).backward()
                optimizer.synchronize()
                if step == interrupted:
                    raise KeyboardInterrupt
                with optimizer.skip_synchronize():
                    optimizer.step()

        with contextlib.suppress(KeyboardInterrupt):
            cell(range(6), interrupted=3)
        cell(range(3, 6))
        assert worst_difference(model, expected) <= 1e-5, worst_difference(model, expected)


def gan(wrapping):
    """Alternating updates, in which the generator's backward pass runs through the other model."""
    torch.manual_seed(0)
    generator = torch.nn.Sequential(OrderedDict(generator=torch.nn.Linear(16, 40)))
    critic = torch.nn.Sequential(OrderedDict(critic=torch.nn.Linear(40, 16)))
    (first, close_first), (second, close_second) = wrapping(generator), wrapping(critic)
    for step in range(6):
        noise = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        second.zero_grad()
        critic(generator(noise).detach()).square().mean().backward()
        second.step()
        first.zero_grad()
        (critic(generator(noise)) - 1).square().mean().backward()
        first.step()
        # As Horovod asks for before zero_grad(); these gradients are the generator's by-product.
        second.synchronize()
    close_first()
    close_second()
    return torch.cat([flat(generator), flat(critic)])


@case
def two_optimizers_of_which_one_gets_gradients_of_the_others_pass():
    def dense(model):
        return hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters()), lambda: None

    expected = gan(dense)
    for way in "ab":

        def compressed(model, way=way):
            optimizer, compression = wrap(way, model, sgd(model), discardable=True, min_numel=64, **EXACT)
            return optimizer, compression.close

        difference = (gan(compressed) - expected).abs().max() / expected.abs().max()
        assert difference <= 1e-5, (way, difference)


@case
def a_scaler_that_skips_a_step_the_compressor_knows_nothing_of():
    """An optimizer step left out by somebody else's judgment, as ``GradScaler.step`` does it."""
    for way in "ab":
        model = make_model()
        expected = dense_reference(model, 5, momentum=0.9)
        optimizer, _ = wrap(way, model, sgd(model), discardable=True, **EXACT)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1000, backoff_factor=1.0 / 2)
        step = 0
        for call in range(7):
            skipped = call in (1, 4)
            scaler.scale(loss_of(model, 60 + call if skipped else step) / scaler.get_scale()).backward()
            optimizer.synchronize()
            if skipped:
                # Overflow found in something that is not the compressor's.
                next(p for p in model.parameters() if p.grad is not None).grad[0, 0] = float("inf")
            with optimizer.skip_synchronize():
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.mul_(scaler.get_scale())
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            step += not skipped
        assert worst_difference(model, expected) <= 1e-5, (way, worst_difference(model, expected))


@case
def a_refused_step_is_returned_once():
    """A non-finite gradient: refused by the compressor, skipped by the user."""
    for way in "ab":
        for discardable in (True, False):
            model = make_model()
            optimizer, compression = wrap(way, model, sgd(model), discardable=discardable, **EXACT)
            loop(optimizer, model, compression, 2, skipped=())
            (loss_of(model, 2) * (float("nan") if hvd.rank() else 1)).backward()
            optimizer.synchronize()
            assert compression.stats.refused_steps == 1
            before = compression.residual_norm
            optimizer.zero_grad()
            assert compression.residual_norm == before
            loop(optimizer, model, compression, 2, skipped=())
            assert_replicas_identical(model, f"refused {way} {discardable}")


@case
def a_sparse_embedding_in_the_first_dropped_step():
    """The exchange is rebuilt after it without the embedding."""
    for discardable in (True, False):
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(50, 20, sparse=True)
        model = torch.nn.Sequential(embedding, torch.nn.Linear(20, 64), torch.nn.Linear(64, 10))
        groups = [
            {"params": list(embedding.parameters()), "momentum": 0.0},
            {"params": [p for layer in list(model)[1:] for p in layer.parameters()], "momentum": 0.9},
        ]
        optimizer, compression = wrap(
            "b", model, torch.optim.SGD(groups, lr=0.1), discardable=discardable, sparsity=0.9, values="float32"
        )
        words = torch.arange(8) + hvd.rank()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (mine,) = torch.autograd.grad(model(words).square().sum(), [model[1].weight])
            model(words).square().sum().backward()
            optimizer.synchronize()
            optimizer.zero_grad()
        saved = compression.state_dict()["parameters"]["1.weight"]
        wanted = np.zeros(mine.numel(), np.float32) if discardable else mine.reshape(-1).numpy()
        np.testing.assert_allclose(saved["v"], wanted, rtol=1e-6)
        np.testing.assert_allclose(saved["u"], wanted, rtol=1e-6)
        assert compression.describe()["step"] == (0 if discardable else 1)


if __name__ == "__main__":
    run_cases()
