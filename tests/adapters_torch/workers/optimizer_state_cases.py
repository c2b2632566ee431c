"""The optimizer's own state dict, saved and loaded without the compressor's state, on 2 real ranks."""

import copy

import horovod.torch as hvd
import torch
from adapters_torch.workers.tensors import through_file
from models import (
    EXACT,
    assert_replicas_identical,
    broadcast,
    close,
    distribute,
    flat,
    loss_of,
    make_model,
    on_every_rank,
    quiet,
    train,
    worst_difference,
    wrap,
)
from models import sgd as momentum_sgd
from worker_tools import case, warned

import dgc.torch as dgc

OWN = dict(momentum=0.9, nesterov=True, weight_decay=0.01)
LOST = "none into the compressor"


def sgd(model, **options):
    return momentum_sgd(model, **{**OWN, **options})


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def first_run(way, make=sgd, **options):
    """Six steps; the saved state of model and optimizer."""
    model = make_model()
    optimizer, compression = distribute(way, model, make(model), **options)
    broadcast(model, optimizer)
    train(optimizer, model, 6)
    if compression is not None:
        compression.average(optimizer)
    saved = through_file(model.state_dict()), through_file(optimizer.state_dict())
    close(compression)
    return saved


def restored_run(way, saved, load, make=sgd, **options):
    """A new model and a new optimizer in which rank 0, or every rank, loads ``saved``; trained on."""
    weights, state = saved
    model = make_model(seed=4 + hvd.rank())
    base = make(model)
    loads = load.startswith("all") or hvd.rank() == 0
    if loads and load.endswith("before"):
        base.load_state_dict(through_file(state))
    optimizer, compression = distribute(way, model, base, **options)
    if loads:
        model.load_state_dict(weights)
        if load.endswith("after"):
            optimizer.load_state_dict(through_file(state))
    if load.startswith("root"):
        broadcast(model, optimizer)
    train(optimizer, model, 6, start=6)
    return model, optimizer, compression


@case(way="ab", broadcasts=(False, True))
def it_holds_the_users_own_options_and_no_empty_entries(way, broadcasts):
    model = make_model()
    optimizer, _ = wrap(way, model, sgd(model), sparsity=0.9)
    if broadcasts:
        broadcast(model, optimizer)
    for steps in (0, 3):
        train(optimizer, model, steps)
        for saved in (optimizer.state_dict(), copy.deepcopy(optimizer.state_dict())):
            group = saved["param_groups"][0]
            assert {name: group[name] for name in OWN} == OWN, group
            assert all(saved["state"].values()), saved["state"]
    assert not optimizer.state, "momentum is the compressor's"
    assert all(entry["momentum_buffer"].any() for entry in saved["state"].values()), "which lends it to saved states"
    plain = sgd(make_model())
    plain.load_state_dict(saved)
    assert plain.param_groups[0]["momentum"] == 0.9


KINDS = {"sgd": (sgd, 1e-5), "adam": (adam, 1e-3), "sgd of a dense run": (sgd, 1e-5)}  # Adam divides by small numbers


@case(way="ab", kind=KINDS, load=("root after", "root before", "all after", "all before"))
def it_loads_before_or_after_wrapping_on_one_rank_or_all(way, kind, load):
    if (way, kind, load) == ("a", "adam", "root before"):
        return  # broadcast_optimizer_state() counts a step of an Adam that has no state
    make, bound = KINDS[kind]
    first = "dense" if "dense" in kind else way
    saved = quiet(first_run, first, make, **EXACT)
    weights, state = saved
    if way == "a" and load.endswith("before"):  # Horovod's own optimizer forgets it, in dense training, too
        state = {**state, "state": {}}
    expected, _, _ = restored_run("dense", (weights, state), "all after", make)
    model, optimizer, compression = quiet(restored_run, way, saved, load, make, **EXACT)
    assert worst_difference(model, expected) <= bound
    own = {name: value for name, value in state["param_groups"][0].items() if name != "params"}
    assert {name: optimizer.param_groups[0][name] for name in own} == own
    compression.close()
    saved = quiet(first_run, first, make, sparsity=0.99)
    model, _, compression = quiet(restored_run, way, saved, load, make, sparsity=0.99)
    compression.average()
    assert_replicas_identical(model)


@case(way="ab", everywhere=(False, True), searches=(False, True))
def going_back_within_one_process_equals_dense_training(way, everywhere, searches):
    """To the best model, or to the one before a search for a learning rate: on rank 0 and broadcast, or on all."""
    runs = []
    for kind, options in (("dense", {}), (way, EXACT), (way, dict(sparsity=0.99))):
        model = make_model()
        # Without decay, which in stock Horovod moves the parameters in the step that a broadcast makes.
        optimizer, compression = distribute(kind, model, sgd(model, weight_decay=0.0), **options)
        quiet(broadcast, model, optimizer)
        if not searches:
            train(optimizer, model, 4)
        if compression is not None:
            compression.average(optimizer)
        saved = through_file(model.state_dict()), through_file(optimizer.state_dict())
        if searches:
            for group in optimizer.param_groups:
                group["lr"] = 0.5
        train(optimizer, model, 4, start=20)

        def go_back(model=model, optimizer=optimizer, saved=saved):
            if everywhere or hvd.rank() == 0:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            if not everywhere:
                broadcast(model, optimizer)
            train(optimizer, model, 4, start=4)

        lost = options.get("sparsity") == 0.99 and not searches
        assert warned(go_back, LOST) == (lost and hvd.rank() == 0)
        assert_replicas_identical(model)
        runs.append(model)
        close(compression)
    assert worst_difference(runs[1], runs[0]) <= 1e-5


@case(way="ab", everywhere=(False, True))
def nothing_of_the_run_that_was_left_survives(way, everywhere):
    """A step of zero gradients after the load must move nothing."""
    model = make_model()
    optimizer, compression = wrap(way, model, sgd(model, weight_decay=0.0), sparsity=0.99)
    saved = through_file(optimizer.state_dict())
    train(optimizer, model, 5)
    assert compression.residual_norm > 0
    if everywhere or hvd.rank() == 0:
        optimizer.load_state_dict(saved)
    if not everywhere:
        broadcast(model, optimizer)
    before = flat(model)
    optimizer.zero_grad()
    (0 * loss_of(model, 9)).backward()
    quiet(optimizer.step)
    assert torch.equal(flat(model), before)
    assert compression.residual_norm == 0
    assert compression.describe()["step"] == 6, "the schedule goes on"


@case("mpirun", "gloo", way="ab")
def loaded_on_one_rank_and_never_broadcast_it_is_an_error(way):
    model = make_model()
    optimizer, _ = wrap(way, model, sgd(model), sparsity=0.9)
    saved = through_file(optimizer.state_dict())
    train(optimizer, model, 2)
    if hvd.rank() == 0:
        optimizer.load_state_dict(saved)
    quiet(on_every_rank, dgc.ConfigError, "broadcast the optimizer's state", lambda: train(optimizer, model, 1))


@case(way="ab")
def a_model_that_was_restored_on_one_rank_alone_is_an_error(way):
    model = make_model()
    optimizer, _ = wrap(way, model, sgd(model), sparsity=0.9)
    train(optimizer, model, 2)
    if hvd.rank() == 0:
        model.load_state_dict(make_model(seed=3).state_dict())
        optimizer.load_state_dict(through_file(optimizer.state_dict()))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    quiet(on_every_rank, dgc.ConfigError, "broadcast_parameters", lambda: train(optimizer, model, 1))


@case(way="ab", everywhere=(False, True), stepped=(False, True))
def a_load_before_the_first_step_is_told_only_where_something_is_lost(way, everywhere, stepped):
    """Accelerate loads an optimizer's own state as soon as it gets it."""
    trained, model = make_model(), make_model()
    optimizer, compression = wrap(way, trained, sgd(trained), sparsity=0.9)
    saved = through_file(optimizer.state_dict())
    train(optimizer, trained, 2)
    if stepped:
        saved = through_file(optimizer.state_dict())
    compression.close()
    optimizer, _ = wrap(way, model, sgd(model), sparsity=0.9)

    def load_and_train():
        if everywhere or hvd.rank() == hvd.size() - 1:
            optimizer.load_state_dict(saved)
            optimizer.load_state_dict(through_file(optimizer.state_dict()))
        model.load_state_dict(trained.state_dict())
        if not everywhere:
            hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.size() - 1)
        train(optimizer, model, 2)

    assert warned(load_and_train, LOST) == (stepped and hvd.rank() == 0)


@case(way="ab")
def clearing_it_by_hand_leaves_momentum_with_the_compressor(way):
    ends = []
    for clears in (False, True):
        model = make_model()
        optimizer, _ = wrap(way, model, sgd(model), sparsity=0.9)
        for step in range(6):
            if clears:
                optimizer.state.clear()
            train(optimizer, model, 1, start=step)
        ends.append(flat(model))
    assert torch.equal(*ends)
