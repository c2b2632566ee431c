"""dgc.torch.join with uneven numbers of batches, on real ranks of Horovod or torch.distributed."""

import contextlib
import os
import re
import warnings
from functools import partial

import torch
from adapters_torch.workers.tensors import (
    assert_replicas_identical,
    gathered_objects,
    loss_of,
    make_model,
    unpickling_is_an_error,
)
from torch import nn
from worker_tools import case, close_later, launch_rank, launch_size
from worker_tools import uneven_batches as batches

import dgc.torch as dgc

if "TORCHELASTIC_RUN_ID" in os.environ:
    from adapters_torch import torchrun_tools  # noqa: F401, initialises it

EXACT = {"sparsity": 0.0, "values": "float32", "small": "float32"}
SGD = {
    "plain": {"lr": 0.1},
    "nesterov decay": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}


rank, size = launch_rank, launch_size


def wrap(model, optimizer, passes=1, **options):
    compression = close_later(dgc.Compression.dgc(**options))
    optimizer = dgc.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=compression, backward_passes_per_step=passes
    )
    return optimizer, compression


def train(optimizer, model, steps, start=0, after=None):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if after is not None:
            after()


def reference(gap, options, more=0, clip=None, divide=lambda training_before: size()):
    """Dense SGD in one process, in which ranks without data give zeros."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), **options)
    longest, training = max(batches(gap, r) for r in range(size())), size()
    for step in range(longest + more):
        members = [r for r in range(size()) if step < batches(gap, r) or step >= longest]
        by = divide(training if step < longest else size())
        training = len(members)
        optimizer.zero_grad()
        for r in members:
            (loss_of(model, step, rank=r) / by).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def assert_identical(model):
    assert_replicas_identical(model.parameters())


def assert_close(model, expected, tolerance=1e-5):
    for a, e in zip(model.parameters(), expected.parameters(), strict=True):
        assert (a - e).abs().max() <= tolerance * e.abs().max(), ((a - e).abs().max() / e.abs().max()).item()


def error_on_every_rank(function, error, match):
    try:
        function()
        text = "nothing was raised"
    except error as raised:
        text = str(raised)
    texts = gathered_objects(text)
    assert all(re.search(match, each) for each in texts), texts


@case(gap=(1, 17), sgd=SGD)
def uneven_data_equal_zeros_by_hand_at_sparsity_0(gap, sgd):
    model = make_model()
    optimizer, compression = wrap(model, torch.optim.SGD(model.parameters(), **SGD[sgd]), **EXACT)
    train(optimizer, model, batches(gap))
    assert dgc.join(compression) == size() - 2
    assert_identical(model)
    assert_close(model, reference(gap, SGD[sgd]))
    train(optimizer, model, 4, start=batches(gap, size() - 2))
    assert_identical(model)
    assert_close(model, reference(gap, SGD[sgd], more=4))


@case(gap=(1, 5))
def replicas_are_identical_at_sparsity_099(gap):
    model = make_model()
    optimizer, compression = wrap(
        model, torch.optim.SGD(model.parameters(), **SGD["nesterov decay"]), sparsity=[0.9, 0.99], rampup_step=20
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=200)
    for epoch in range(2):
        train(optimizer, model, batches(gap), start=100 * epoch, after=schedule.step)
        dgc.join(compression)
        assert_identical(model)
        assert len(set(gathered_objects(optimizer.param_groups[0]["lr"]))) == 1
        # A schedule by batches is behind on ranks that had fewer.
        schedule.load_state_dict(gathered_objects(schedule.state_dict())[size() - 2])
        train(optimizer, model, 5, start=100 * epoch + 90, after=schedule.step)
        assert_identical(model)
    steps = {r["step"] for r in gathered_objects(compression.describe())}
    assert steps == {2 * (batches(gap, size() - 2) + 5)}


@case
def nothing_is_lost():
    """What the ranks computed is in the parameters or in their residuals."""
    model = make_model()
    before = flat(model)
    optimizer, compression = wrap(
        model, torch.optim.SGD(model.parameters(), lr=0.1), sparsity=0.99, values="float32", small="float32"
    )
    total = torch.zeros_like(before)
    for step in range(batches(5)):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        total += torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, model.parameters(), retain_graph=True)])
        loss.backward()
        optimizer.step()
    dgc.join(compression)
    residuals = compression.state_dict(own=True)["parameters"]
    entries = [residuals[name] for name, _ in model.named_parameters()]
    left = torch.cat([entry.get("v", 0 * entry["u"]) for entry in entries])
    assert left.abs().max() > 0
    mean = sum(gathered_objects(total - left)) / size()
    assert torch.allclose(before - flat(model), 0.1 * mean, atol=2e-6), (before - flat(model) - 0.1 * mean).abs().max()


@case("2ranks", "4ranks", sgd=SGD)
def sums_are_divided_by_those_that_train(sgd):
    model = make_model()
    optimizer, compression = wrap(model, torch.optim.SGD(model.parameters(), **SGD[sgd]), **EXACT)
    train(optimizer, model, batches(5))
    dgc.join(compression, divide_by="training")
    assert_identical(model)
    assert_close(model, reference(5, SGD[sgd], divide=lambda training: training))
    train(optimizer, model, 3, start=batches(5, size() - 2))
    assert_close(model, reference(5, SGD[sgd], more=3, divide=lambda training: training))


def computed_loss(optimizer, model, step):
    optimizer.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    return loss


@case(kind=("clipped", "closure"), sgd=SGD)
def clipped_and_closure_steps_end_with_identical_replicas(kind, sgd):
    model = make_model()
    optimizer, compression = wrap(model, torch.optim.SGD(model.parameters(), **SGD[sgd]), **EXACT)
    for step in range(batches(5) + 3):
        if step == batches(5):
            dgc.join(compression)
            assert_identical(model)
        step += max(0, batches(5, size() - 2) - batches(5)) * (step >= batches(5))
        if kind == "closure":
            optimizer.step(partial(computed_loss, optimizer, model, step))
            continue
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_identical(model)
    if sgd == "plain":  # else the results hold momentum
        assert_close(model, reference(5, SGD[sgd], more=3, clip=0.1 if kind == "clipped" else None))


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


@case(synchronizes=(False, True))
def adam_has_the_same_state_everywhere(synchronizes):
    model = make_model()
    optimizer, compression = wrap(model, adam(model), sparsity=0.9, error_feedback="classic")
    for step in range(0 if rank() == 0 else 7):  # rank 0 has no batch at all
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if synchronizes:
            optimizer.synchronize()
        with optimizer.skip_synchronize() if synchronizes else contextlib.nullcontext():
            optimizer.step()
    assert dgc.join(compression) == size() - 1
    state = [optimizer.state[p][k] for p in model.parameters() for k in ("step", "exp_avg", "exp_avg_sq")]
    assert_replicas_identical(state)
    assert state[0] == 7
    train(optimizer, model, 5, start=20)
    assert_identical(model)


@case
def the_last_ranks_state_comes_without_pickle():
    model = make_model()
    optimizer, compression = wrap(model, adam(model), sparsity=0.9, error_feedback="classic")
    train(optimizer, model, 2 + 3 * rank())
    optimizer.state[model[0].weight]["last"] = torch.tensor(rank())
    with unpickling_is_an_error():
        last = dgc.join(compression)
    assert optimizer.state[model[0].weight]["last"] == last == size() - 1
    assert_identical(model)


@case
def a_state_that_cannot_travel_is_an_error_on_every_rank():
    model = make_model()
    optimizer, compression = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), sparsity=0.9)
    train(optimizer, model, 2 + rank())
    if rank() == 0:
        optimizer.state[model[0].weight]["history"] = object()
    error_on_every_rank(lambda: dgc.join(compression), dgc.ConfigError, "the state of SGD holds a object")


@case
def a_state_on_another_ranks_gpu_comes_to_this_ranks_device():
    """Each rank's tensors say that they are on a GPU of their own."""
    registry = torch.serialization._package_registry
    torch.serialization.register_package(0, lambda storage: f"cuda:{rank()}", lambda storage, place: None)
    try:
        model = make_model()
        optimizer, compression = wrap(model, adam(model), sparsity=0.9, error_feedback="classic")
        train(optimizer, model, 2 + 3 * rank())
        assert dgc.join(compression) == size() - 1
        assert_identical(model)
        assert_replicas_identical([optimizer.state[p]["exp_avg_sq"] for p in model.parameters()])
    finally:
        registry[:] = [entry for entry in registry if entry[0] != 0]


@case
def nothing_changes_where_all_join_together():
    model = make_model()
    optimizer, compression = wrap(model, torch.optim.SGD(model.parameters(), **SGD["nesterov decay"]), sparsity=0.99)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dgc.join(compression) == size() - 1
        for epoch in range(3):
            train(optimizer, model, 4, start=10 * epoch)
            before, parameters = compression.state_dict(own=True), flat(model)
            assert dgc.join(compression) == size() - 1
            after = compression.state_dict(own=True)
            assert after["step"] == before["step"] == 4 * (epoch + 1)
            assert torch.equal(flat(model), parameters)
            torch.testing.assert_close(after["parameters"], before["parameters"], rtol=0, atol=0, equal_nan=True)
    assert_identical(model)


@case
def an_accumulation_that_did_not_end_is_dropped():
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), **SGD["nesterov decay"])
    optimizer, compression = wrap(model, plain, passes=2, **EXACT)
    for step in range(batches(5)):
        for _ in range(2):
            (loss_of(model, step) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_of(model, 999).backward()
    dgc.join(compression)
    assert_close(model, reference(5, SGD["nesterov decay"]))


@case
def mistakes_are_errors_on_every_rank():
    model = make_model()
    optimizer, compression = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), sparsity=0.9)
    train(optimizer, model, 2)
    error_on_every_rank(lambda: dgc.join(compression, divide_by="none"), dgc.ConfigError, "'all', 'training'")
    compression.reset()
    different = ("all", "training")[rank() % 2]
    error_on_every_rank(lambda: dgc.join(compression, different), dgc.ConfigError, "different values of divide")
    compression.reset()
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    error_on_every_rank(lambda: dgc.join(compression), dgc.LayoutError, r"between backward\(\) and step\(\)")


@case
def a_whole_number_takes_over_a_fraction():
    model = make_model()
    optimizer, compression = wrap(model, torch.optim.SGD(model.parameters(), lr=1), sparsity=0.9)
    if rank() > 0:
        optimizer.param_groups[0]["lr"] = 0.1
        train(optimizer, model, 3)
    dgc.join(compression)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert_identical(model)


@case
def an_error_of_a_training_rank_reaches_the_joined_ones():
    model = make_model()
    optimizer, compression = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), sparsity=0.9)
    train(optimizer, model, 2)

    def act():
        if rank() == 0:
            dgc.join(compression)
        else:
            compression.engine.fail(dgc.LayoutError("a broken batch"))

    error_on_every_rank(act, dgc.LayoutError, "a broken batch")
    compression.reset()
    train(optimizer, model, 2)
