"""Horovod's ``broadcast_optimizer_state()``, which steps the optimizer of a rank that has no state."""

import copy

import horovod.torch as hvd
import torch
from adapters_torch.workers.tensors import through_file
from models import (
    assert_replicas_identical,
    broadcast,
    flat,
    make_model,
    on_every_rank,
    sgd,
    train,
    wrap,
)
from worker_tools import case

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


@case(way="ab", name=OPTIMIZERS)
def it_moves_no_parameter_of_a_rank_that_has_loaded_no_checkpoint(way, name):
    """In the order of Horovod's documentation: first the parameters, then the optimizer's state."""
    model, optimizer, compression = wrapped(way, name)
    train(optimizer, model, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    compression.close()
    model, optimizer, compression = wrapped(way, name, seed=5)
    if hvd.rank() == 0:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = flat(model)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert torch.equal(flat(model), before)
    train(optimizer, model, 3, start=3)
    compression.average()
    assert_replicas_identical(model)


@case(order=("parameters, state", "state, parameters"))
def before_the_wrapping_the_parameters_come_last(order):
    """Horovod steps the plain optimizers of ranks without a state, and their decay moves parameters."""
    model, rank = make_model(seed=hvd.rank()), hvd.rank()
    optimizer = sgd(model, weight_decay=0.1)
    if rank == 0:
        train(optimizer, model, 2)
    for what in order.split(", "):
        if what == "state":
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        else:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer, _ = wrap("b", model, optimizer, sparsity=0.9)
    if order == "state, parameters":
        train(optimizer, model, 3)
        assert_replicas_identical(model)
    else:
        match = "broadcast_optimizer_state.* and, after it, hvd.broadcast_parameters.*weight decay moves"
        on_every_rank(dgc.ConfigError, match, lambda: train(optimizer, model, 1))


@case(way="ab")
def after_loading_a_checkpoint_on_all_ranks_it_changes_nothing(way):
    straight, resumed = make_model(), make_model(seed=4)
    optimizer, compression = wrap(way, straight, sgd(straight, weight_decay=0.01), sparsity=0.9)
    train(optimizer, straight, 4)
    compression.average(optimizer)
    saved = through_file([each.state_dict() for each in (straight, optimizer, compression)])
    train(optimizer, straight, 4, start=4)
    compression.close()
    optimizer, compression = wrap(way, resumed, sgd(resumed, weight_decay=0.01), sparsity=0.9)
    for each, state in zip((resumed, optimizer, compression), saved, strict=True):
        each.load_state_dict(state)
    broadcast(resumed, optimizer)
    train(optimizer, resumed, 4, start=4)
    assert torch.equal(flat(resumed), flat(straight))


@case(way="ab")
def residuals_stay_each_ranks_own(way):
    model = make_model()
    optimizer, compression = wrap(way, model, sgd(model), sparsity=0.99)
    broadcast(model, optimizer)
    assert compression.engine.exchange.state.step == 0
    optimizer.zero_grad()
    train(optimizer, model, 3)
    before, norm = compression.state_dict(own=True), compression.residual_norm
    assert len(set(hvd.allgather_object(norm, name="norms"))) == hvd.size(), "residuals differ between ranks"
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    after = compression.state_dict(own=True)
    assert compression.residual_norm == norm
    for name, entry in before["parameters"].items():
        for key, value in entry.items():
            assert (value == after["parameters"][name][key]).all() or key == "threshold"
    optimizer.zero_grad()
    train(optimizer, model, 3, start=3)
    assert_replicas_identical(model)


@case(way="ab")
def replicas_that_differ_by_one_bit_are_refused_before_the_first_update(way):
    model, optimizer, _ = wrapped(way, "SGD")
    if hvd.rank() == 1:
        with torch.no_grad():
            value = model.left.weight[20, 30]
            model.left.weight[20, 30] = torch.nextafter(value, torch.tensor(9.0))
    before = flat(model)
    wrong = "'left.weight' has other values on rank 1 than on rank 0"
    on_every_rank(dgc.ConfigError, wrong, lambda: train(optimizer, model, 1))
    assert torch.equal(flat(model), before)
