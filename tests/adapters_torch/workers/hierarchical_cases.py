"""Ranks that send as one: on 4 ranks, in groups of 2 neighbours."""

import horovod.torch as hvd
import torch
from models import (
    OPTIMIZERS,
    assert_replicas_identical,
    dense_reference,
    make_model,
    raises,
    sgd,
    train,
    worst_difference,
    wrap,
)
from worker_tools import case, close_later

import dgc.torch as dgc
from dgc.errors import ConfigError, DGCError, LayoutError, StallError

SPARSE = {"sparsity": 0.9, "min_numel": 64}
EXACT = {"sparsity": 0.0, "momentum_masking": False, "values": "float32", "small": "float32"}


@case(way="ab", name=("nesterov decay", "plain"))
def sparsity_0_equals_dense_sgd(way, name):
    model = make_model()
    expected = dense_reference(model, 20, **OPTIMIZERS[name])
    optimizer, _ = wrap(way, model, sgd(model, **OPTIMIZERS[name]), hierarchical=2, **EXACT)
    train(optimizer, model, 20)
    assert worst_difference(model, expected) <= 1e-5
    assert_replicas_identical(model)


@case(way="ab")
def what_no_rank_uses_is_left_alone(way):
    def branch(rank, step):
        return "left" if step % 3 == 0 or (step % 3 == 1 and rank != 3) else "both"

    model, own = make_model(), OPTIMIZERS["nesterov decay"]
    expected = dense_reference(model, 12, branch=branch, **own)
    optimizer, _ = wrap(way, model, sgd(model, **own), hierarchical=2, **EXACT)
    train(optimizer, model, 12, branch=lambda step: branch(hvd.rank(), step))
    assert worst_difference(model, expected) <= 1e-5
    assert_replicas_identical(model)


@case
def a_state_goes_on_bit_for_bit_and_with_other_groups_from_the_same_means():
    straight, ends = make_model(), {}
    optimizer, compression = wrap("b", straight, sgd(straight), hierarchical=2, **SPARSE)
    train(optimizer, straight, 5)
    compression.average(optimizer)
    saved = hvd.allgather_object([each.state_dict() for each in (straight, optimizer, compression)])[0]
    train(optimizer, straight, 5, start=5)
    for groups in (2, 1, 4):
        model, options = make_model(seed=3), {} if groups == 1 else {"hierarchical": groups}
        optimizer, compression = wrap("b", model, sgd(model), **options, **SPARSE)
        for each, state in zip((model, optimizer, compression), saved, strict=True):
            each.load_state_dict(state)
        for name, entry in compression.state_dict()["parameters"].items():
            for key in {"u", "v"} & set(entry):
                assert torch.equal(entry[key], saved[2]["parameters"][name][key]), (groups, name, key)
        train(optimizer, model, 5, start=5)
        assert_replicas_identical(model, f"groups of {groups}")
        ends[groups] = model
    for a, b in zip(straight.parameters(), ends[2].parameters(), strict=True):
        assert torch.equal(a, b)


@case
def a_group_that_gives_a_step_up_alone_is_an_error_and_a_reset_of_all_goes_on():
    """The groups' messages have other sizes then; nobody may be left in a collective of the step before."""
    model = make_model()
    schedule = {"min_numel": 64, "sparsity": [0.5, 0.9, 0.99], "rampup_step": 6}
    optimizer, compression = wrap("b", model, sgd(model), hierarchical=2, **schedule)
    train(optimizer, model, 4)
    if hvd.rank() >= 2:
        compression.reset()
    raised = raises(DGCError, "", lambda: train(optimizer, model, 1, start=4))
    assert not isinstance(raised, StallError), raised
    compression.reset()
    optimizer.zero_grad()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(optimizer, model, 3, start=5)
    assert_replicas_identical(model, "after all were reset")


@case
def a_construction_that_fails_can_be_repeated():
    model = make_model()
    different = sgd(model, momentum=0.9 if hvd.rank() else 0.5)
    for _ in range(2):
        raises(LayoutError, "momentum", lambda: wrap("a", model, different, hierarchical=2, **SPARSE))
    optimizer, _ = wrap("a", model, sgd(model), hierarchical=2, **SPARSE)
    train(optimizer, model, 2)
    assert_replicas_identical(model)


@case
def learning_rates_that_differ_within_a_group_are_an_error_on_all():
    model = make_model()
    different = sgd(model, lr=0.1 if hvd.rank() != 3 else 0.2, momentum=0.0)
    optimizer, _ = wrap("b", model, different, hierarchical=2, **SPARSE)
    raises(DGCError, "rank 3 has another message|learning rate", lambda: train(optimizer, model, 2))


@case(asked=(True, "auto", 4, 2))
def all_ranks_of_one_machine_are_one_node(asked):
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model, momentum=0.0), hierarchical=asked, **SPARSE)
    train(optimizer, model, 3)
    told = compression.describe()
    assert (told["ranks"], told["nodes"]) == (4, {True: 1, "auto": None, 4: 1, 2: 2}[asked])
    assert_replicas_identical(model)


@case(asked=(3, 1, 0, -2, "yes", 2.5, None))
def what_cannot_be_a_group_is_refused_everywhere(asked):
    model = make_model()
    raises((ConfigError, TypeError), "hierarchical", lambda: wrap("b", model, sgd(model), hierarchical=asked))


@case
def groups_need_mpi():
    model = make_model()
    raises(ConfigError, "needs MPI", lambda: wrap("b", model, sgd(model), hierarchical=2, transport="horovod"))


@case(name=("qsgd", "onebit", "terngrad", "topk"))
def other_compressors_send_as_one_too(name):
    model = make_model()
    compression = close_later(getattr(dgc.Compression, name)(hierarchical=2, min_numel=64))
    optimizer = dgc.DistributedOptimizer(
        sgd(model, lr=0.05, momentum=0.0), named_parameters=model.named_parameters(), compression=compression
    )
    train(optimizer, model, 5)
    assert compression.describe()["nodes"] == 2
    assert_replicas_identical(model)
