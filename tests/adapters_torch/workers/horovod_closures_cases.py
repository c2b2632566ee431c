"""``step(closure)`` with Horovod's own optimizer and with dgc's, on 2 real ranks."""

import contextlib

import torch
from models import (
    EXACT,
    close,
    distribute,
    flat,
    loss_of,
    make_model,
    on_every_rank,
    quiet,
    sgd,
    worst_difference,
    wrap,
)
from worker_tools import case

import dgc.torch as dgc


def skipping(optimizer, skips=True):
    return optimizer.skip_synchronize() if skips else contextlib.nullcontext()


@case(way="ab", skips=(False, True))
def a_closure_that_synchronizes_equals_dense_training(way, skips):
    """It averages its own gradients; step() must not take the last results for new gradients."""
    models = []
    for kind, options in (("dense", {}), (way, EXACT)):
        model = make_model()
        optimizer, compression = distribute(kind, model, sgd(model), **options)
        for step in range(6):

            def closure(step=step, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                optimizer.synchronize()
                return loss

            with skipping(optimizer, skips):
                quiet(optimizer.step, closure)
        models.append(model)
        assert not (skips and compression) or compression.describe()["step"] == 6
        close(compression)
    assert worst_difference(*models) <= 1e-5


@case(way="ab")
def an_optimizer_that_calls_its_closure_more_than_once_equals_one_on_one_rank(way):
    """All ranks have the same batch, so that the mean is each one's gradient. Each call is a step of the exchange."""

    def run(distributes):
        model, calls = make_model(), []
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.LBFGS(trained, lr=0.1, max_iter=2)
        if distributes:
            optimizer, compression = wrap(way, model, optimizer, **EXACT)

        def closure():
            calls.append(optimizer)
            optimizer.zero_grad()
            loss = loss_of(model, 0, rank=0)
            loss.backward()
            if distributes:
                optimizer.synchronize()
            return loss

        for _ in range(3):
            with skipping(optimizer, distributes):
                optimizer.step(closure)
        assert not distributes or compression.describe()["step"] == len(calls) > 3
        return model

    assert worst_difference(run(True), run(False)) <= 1e-4


@case
def gradients_of_a_closure_that_horovods_own_does_not_average_are_an_error():
    model = make_model()
    optimizer, _ = wrap("a", model, sgd(model), sparsity=0.9)
    before = flat(model).clone()

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    on_every_rank(dgc.ConfigError, "call the closure, then step", lambda: optimizer.step(closure))
    assert torch.equal(flat(model), before)


@case
def a_closure_that_only_returns_a_loss_changes_nothing():
    ends = []
    for by_closure in (False, True):
        model = make_model()
        optimizer, compression = wrap("a", model, sgd(model), sparsity=0.9)
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step(*[lambda loss=loss: loss] * by_closure)
        ends.append(flat(model))
        compression.close()
    assert torch.equal(*ends)
