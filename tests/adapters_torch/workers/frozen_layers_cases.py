"""On real ranks: layers that are frozen, unfrozen or unused, on all ranks or on some."""

import horovod.torch as hvd
import torch
from models import (
    EXACT,
    assert_replicas_identical,
    dense_backward,
    flat,
    loss_of,
    make_model,
    on_every_rank,
    sgd,
    train,
    worst_difference,
    wrap,
)
from worker_tools import case

import dgc.torch as dgc

OWN = dict(momentum=0.9, weight_decay=0.01)
OPTIMIZERS = {
    "SGD momentum": (sgd, {}),
    "SGD": (lambda m: sgd(m, momentum=0.0), {"momentum": 0.0}),
    "AdamW": (lambda m: torch.optim.AdamW(m.parameters()), {"momentum": 0.0}),
}
BRANCHES = ("left", "right", "both")


def freeze(model, step):
    model.left.requires_grad_(not 3 <= step < 9)


@case(way="ab", optimizer=OPTIMIZERS)
def a_frozen_layer_does_not_move_by_a_bit(way, optimizer):
    model = make_model()
    make, options = OPTIMIZERS[optimizer]
    optimizer, _ = wrap(way, model, make(model), sparsity=0.99, **options)
    train(optimizer, model, 4)
    model.left.requires_grad_(False)
    before = flat(model.left)
    train(optimizer, model, 6, start=4)
    assert torch.equal(flat(model.left), before)
    assert_replicas_identical(model)


@case(way="ab", in_place=(False, True))
def a_frozen_layer_equals_that_of_dense_training(way, in_place):
    """If its gradient is zeroed in place, its momentum moves it."""
    model, expected = make_model(), make_model()
    plain = sgd(expected, **OWN)
    optimizer, _ = wrap(way, model, sgd(model, **OWN), **EXACT)
    for step in range(14):
        for each in (model, expected):
            freeze(each, step)
            each.zero_grad(set_to_none=not in_place)
        loss_of(model, step).backward()
        optimizer.step()
        dense_backward(expected, step)
        plain.step()
    assert worst_difference(model, expected) <= 1e-5


@case(way="ab", begin=(0, 10))
def replicas_are_identical_where_ranks_use_different_layers(way, begin):
    """The orders of their backward passes differ, too."""
    model = make_model(width=128)
    options = dict(sparsity=[0.75, 0.99], rampup_step=10, rampup_begin_step=begin, bucket_bytes=40_000)
    optimizer, compression = wrap(way, model, sgd(model, lr=0.05, nesterov=True), **options)
    train(optimizer, model, 50, branch=lambda step: BRANCHES[(step + hvd.rank()) % 3])
    assert_replicas_identical(model)
    assert len(compression.engine.exchange.layout.buckets) > 1
    assert 0.005 < compression.stats.last.density < 0.011


@case(way="ab")
def a_layer_that_was_frozen_at_the_wrapping_cannot_be_unfrozen(way):
    model = make_model()
    optimizer, _ = wrap(way, model, sgd(model), sparsity=0.9)
    train(optimizer, model, 1)
    model.frozen.requires_grad_(True)
    match = "build a new optimizer and wrap it after adding or unfreezing"
    on_every_rank(dgc.LayoutError, match, lambda: train(optimizer, model, 1))
