"""``step(closure)`` of Horovod's own optimizer with our compressor."""

from __future__ import annotations

import torch
from models import flat, loss_of, make_model, on_every_rank, sgd, wrap
from worker_tools import case, run_cases

import dgc.torch as dgc


@case
def a_closure_whose_gradients_nobody_averages_is_an_error():
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
def a_closure_that_returns_the_loss_of_a_backward_pass_before_it_changes_nothing():
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


if __name__ == "__main__":
    run_cases()
