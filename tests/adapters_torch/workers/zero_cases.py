"""The sharded optimizer against the unsharded one, on real ranks of Horovod or torch.distributed."""

import copy
import os

import torch
from adapters_torch.workers.tensors import (
    assert_bits_equal,
    assert_replicas_identical,
    gathered,
    gathered_objects,
    raises,
    through_file,
    twin,
    unpickling_is_an_error,
)
from torch import nn
from worker_tools import case, launch_rank, launch_size

import dgc.torch as dgc
from dgc.errors import ConfigError, LayoutError, RemoteError

if "TORCHELASTIC_RUN_ID" in os.environ:
    from adapters_torch import torchrun_tools  # noqa: F401, initialises it
else:
    import horovod.torch as hvd

    hvd.init()

Zero = dgc.ZeroRedundancyOptimizer
RANK, SIZE = launch_rank(), launch_size()
OPTIMIZERS = {
    "adam": (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95)}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


def make_parameters():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 19), nn.Linear(19, 13, bias=False), nn.Linear(13, 5), nn.Linear(5, 3))
    return list(model.parameters())


def parameters_of_sizes(*sizes):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(n, generator=generator)) for n in sizes]


def set_gradients(parameters, step):
    """Averaged ones: the same on all ranks."""
    for i, p in enumerate(parameters):
        if p.requires_grad:
            generator = torch.Generator().manual_seed(1000 * step + i)
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def pair(cls, options, parameters=None, **zero_options):
    """A sharded optimizer and an unsharded one on copies of the same parameters."""
    own = make_parameters() if parameters is None else parameters
    other = twin(own)
    return Zero(own, cls, **zero_options, **options), cls(other, **options), own, other


def step_both(zero, plain, own, other, steps, start=0):
    for step in range(start, start + steps):
        for optimizer, parameters in ((zero, own), (plain, other)):
            optimizer.zero_grad()
            set_gradients(parameters, step)
            optimizer.step()
    assert_bits_equal(own, other)
    assert_replicas_identical(own)


def assert_state_dicts_equal(actual, expected):
    torch.testing.assert_close(actual["state"], expected["state"], rtol=0, atol=0)
    assert actual["param_groups"] == expected["param_groups"]


def consolidated(zero):
    """The whole state on every rank, as from a file that rank 0 wrote."""
    zero.consolidate_state_dict()
    return through_file(gathered_objects(zero.state_dict() if RANK == 0 else None)[0])


# -- steps


@case(optimizer=OPTIMIZERS, view=(False, True), maximize=(False, True))
def same_bits_as_unsharded(optimizer, view, maximize):
    cls, options = OPTIMIZERS[optimizer]
    step_both(*pair(cls, {**options, "maximize": maximize}, parameters_as_bucket_view=view), 6)


@case(optimizer=OPTIMIZERS, view=(False, True))
def same_bits_when_trainability_changes(optimizer, view):
    zero, plain, own, other = pair(*OPTIMIZERS[optimizer], parameters_as_bucket_view=view)
    step_both(zero, plain, own, other, 2)
    for number, trainable, steps in ((1, False, 2), (4, False, 2), (1, True, 3)):
        own[number].requires_grad_(trainable)
        other[number].requires_grad_(trainable)
        step_both(zero, plain, own, other, steps, start=10 * number + trainable)


@case(view=(False, True))
def a_frozen_parameter_with_an_old_gradient_is_updated_everywhere(view):
    """torch's optimizers go by the gradient, not by requires_grad."""
    zero, plain, own, other = pair(*OPTIMIZERS["adam"], parameters_as_bucket_view=view)
    for parameters in (own, other):
        set_gradients(parameters, 0)
        for p in parameters[:4]:
            p.requires_grad_(False)
    zero.step()
    plain.step()
    assert_bits_equal(own, other)
    assert_replicas_identical(own)


@case
def different_starts_become_the_owners():
    own = make_parameters()
    zero = Zero(own, torch.optim.SGD, lr=0.1)
    with torch.no_grad():
        for p in own:
            p.add_(RANK)
    starts = [gathered(p.detach()) for p in own]
    set_gradients(own, 0)
    zero.step()
    assert_replicas_identical(own)
    owners = {id(p): r for r, gs in enumerate(zero.partition_parameters()) for g in gs for p in g["params"]}
    for p, start in zip(own, starts, strict=True):
        torch.testing.assert_close(p.detach(), start[owners[id(p)]] - 0.1 * p.grad)


@case
def only_the_owner_needs_gradients():
    zero, plain, own, other = pair(*OPTIMIZERS["adamw"])
    mine = {id(p) for group in zero.partition_parameters()[RANK] for p in group["params"]}
    for step in range(3):
        set_gradients(own, step)
        set_gradients(other, step)
        for p in own:
            if id(p) not in mine:
                p.grad = None
        zero.step()
        plain.step()
    assert_bits_equal(own, other)


@case
def shards_are_balanced_and_hold_their_own_state_only():
    sizes = [n for n in (9, 7, 5, 3) for _ in range(SIZE)]
    own = parameters_of_sizes(*sizes)
    zero = Zero(own, torch.optim.Adam, lr=0.1)
    sums = [sum(p.numel() for g in groups for p in g["params"]) for groups in zero.partition_parameters()]
    assert sums == [24] * SIZE, sums
    if SIZE == 2:
        owned = Zero(parameters_of_sizes(9, 7, 5, 3, 2), torch.optim.SGD, lr=0.1).partition_parameters()
        assert [[p.numel() for g in groups for p in g["params"]] for groups in owned] == [[9, 3, 2], [7, 5]]
    set_gradients(own, 0)
    zero.step()
    mine = [p for g in zero.partition_parameters()[RANK] for p in g["params"]]
    assert set(map(id, zero.optim.state)) == set(map(id, mine))
    assert not zero.state
    assert set(zero.local_state_dict()["state"]) == set(range(len(mine)))
    zero.zero_grad()
    assert all(p.grad is None for p in own)


@case(optimizer=OPTIMIZERS, view=(False, True))
def fewer_parameters_than_ranks(optimizer, view):
    one = parameters_of_sizes(5)
    zero, plain, own, other = pair(*OPTIMIZERS[optimizer], parameters=one, parameters_as_bucket_view=view)
    step_both(zero, plain, own, other, 3)
    zero.consolidate_state_dict(to=SIZE - 1)
    if RANK == SIZE - 1:
        assert list(zero.state_dict()["state"]) == [0]


@case
def closure_is_evaluated_once_and_its_loss_returned():
    zero, plain, own, other = pair(*OPTIMIZERS["sgd"])
    calls = []

    def closure(parameters, tag, step):
        def evaluate():
            calls.append(tag)
            set_gradients(parameters, step)
            return torch.tensor(4.5 + step)

        return evaluate

    for step in range(3):
        assert zero.step(closure(own, "zero", step)).item() == 4.5 + step
        assert plain.step(closure(other, "plain", step)).item() == 4.5 + step
    assert calls == ["zero", "plain"] * 3
    assert_bits_equal(own, other)


class Unusual(torch.optim.SGD):
    """A step without closure, with an argument, that adds an option of its own."""

    def step(self, kwarg=None):
        super().step()
        for group in self.param_groups:
            group["seen"] = kwarg


@case
def options_and_step_arguments_flow_both_ways():
    own = make_parameters()
    zero = Zero(own, Unusual, lr=0.1)
    assert (zero.param_groups[0]["dampening"], zero.defaults["momentum"]) == (0, 0)
    zero.param_groups[0]["lr"], zero.param_groups[0]["mine"] = 0.5, "note"
    set_gradients(own, 0)
    assert zero.step(kwarg=7) is None
    assert zero.param_groups[0]["seen"] == 7
    assert (zero.optim.param_groups[0]["lr"], zero.optim.param_groups[0]["mine"]) == (0.5, "note")


SCHEDULES = {
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
}


@case(schedule=SCHEDULES, optimizer=OPTIMIZERS)
def schedules_set_the_rate_as_of_the_unsharded_one(schedule, optimizer):
    zero, plain, own, other = pair(*OPTIMIZERS[optimizer])
    both = SCHEDULES[schedule](zero), SCHEDULES[schedule](plain)
    for step in range(8):
        step_both(zero, plain, own, other, 1, start=step)
        for scheduler in both:
            scheduler.step()
        assert zero.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


@case
def a_rate_that_a_schedule_has_set_stays_when_a_group_is_added_or_the_optimizer_wrapped():
    zero = Zero(make_parameters(), torch.optim.SGD, lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(zero, 0.5)
    set_gradients(zero.param_groups[0]["params"], 0)
    zero.step()
    schedule.step()
    zero.add_param_group({"params": make_parameters(), "lr": 3.0})
    assert [group["lr"] for group in zero.param_groups] == [0.5, 3.0]
    schedule.step()
    wrapped = dgc.DistributedOptimizer(zero)
    assert [group["lr"] for group in wrapped.param_groups] == [0.25, 1.5]


@case
def bucket_views_hold_each_ranks_parameters():
    own = make_parameters()
    zero, plain, own, other = pair(*OPTIMIZERS["adam"], parameters=own, parameters_as_bucket_view=True)
    storages = [
        {p.untyped_storage().data_ptr() for g in groups for p in g["params"]} for groups in zero.partition_parameters()
    ]
    assert [len(each) for each in storages] == [1] * SIZE
    step_both(zero, plain, own, other, 2)
    own[0].data = own[0].data.clone()  # somebody re-points it: it is moved back
    step_both(zero, plain, own, other, 2, start=2)
    assert own[0].untyped_storage().data_ptr() != own[0].data_ptr() or own[0].storage_offset() == 0
    for p, q in zip(own, other, strict=True):
        p.data, q.data = p.data.double(), q.data.double()
    zero, plain = Zero(own, torch.optim.SGD, lr=0.1), torch.optim.SGD(other, lr=0.1)
    step_both(zero, plain, own, other, 2)


@case(dtype=("float16", "bfloat16", "float32", "float64"), view=(False, True))
def any_dense_type_and_memory_order(dtype, view):
    dtype = getattr(torch, dtype)
    torch.manual_seed(0)
    own = [nn.Parameter(torch.randn(40, 30).to(dtype)), nn.Parameter(torch.randn(30, 50).t().to(dtype))]
    own += [nn.Parameter(torch.randn(4, 6, 5, 5).to(dtype).to(memory_format=torch.channels_last))]
    own += [nn.Parameter(torch.tensor(0.5, dtype=dtype)), nn.Parameter(torch.empty(0, 3, dtype=dtype))]
    if view:
        # A bucket makes them contiguous, and torch rounds float16 differently along strides.
        for p in own:
            p.data = p.data.contiguous()
    step_both(*pair(torch.optim.SGD, {"lr": 0.1}, parameters=own, parameters_as_bucket_view=view), 3)


# -- groups


@case(view=(False, True))
def groups_given_at_once_or_added_later(view):
    kinds = [{"lr": 0.01}, {"lr": 0.02, "weight_decay": 0.3}, {"lr": 0.01, "betas": (0.5, 0.6)}]
    upfront, later, other = (make_parameters() for _ in range(3))

    def split(ps):
        return [{"params": part, **o} for part, o in zip((ps[:2], ps[2:5], ps[5:]), kinds, strict=True)]

    whole = Zero(split(upfront), torch.optim.AdamW, parameters_as_bucket_view=view)
    grown = Zero(split(later)[:1], torch.optim.AdamW, parameters_as_bucket_view=view)
    before = [[list(map(id, g["params"])) for g in groups] for groups in grown.partition_parameters()]
    for group in split(later)[1:]:
        grown.add_param_group(group)
    after = [[list(map(id, g["params"])) for g in groups[:1]] for groups in grown.partition_parameters()]
    assert after == before
    plain = torch.optim.AdamW(split(other))
    for step in range(4):
        for optimizer, parameters in ((whole, upfront), (grown, later), (plain, other)):
            set_gradients(parameters, step)
            optimizer.step()
    assert_bits_equal(upfront, other)
    assert_bits_equal(later, other)
    assert_replicas_identical(later)


@case
def a_group_that_cannot_be_added_changes_nothing():
    own, other = parameters_of_sizes(4, 5), parameters_of_sizes(6)
    zero = Zero(own, torch.optim.SGD, lr=0.1)
    raises(TypeError, "dict", lambda: zero.add_param_group(other))
    for error, group in (
        (ValueError, {"params": [other[0].detach().double().requires_grad_()]}),
        (ValueError, {"params": [own[0]]}),
        (ValueError, {"params": [nn.Parameter(own[0].data)]}),
        (ValueError, {"lr": 0.1}),
    ):
        raises(error, "", lambda: zero.add_param_group(group))  # noqa: B023
    assert (len(zero.param_groups), len(zero.optim.param_groups)) == (1, 1)
    zero.add_param_group({"params": other})
    set_gradients([*own, *other], 0)
    zero.step()
    assert_replicas_identical([*own, *other])


# -- state


@case(optimizer=OPTIMIZERS, view=(False, True))
def the_state_dict_is_the_unsharded_ones_and_loads_both_ways(optimizer, view):
    cls, options = OPTIMIZERS[optimizer]
    zero, plain, own, other = pair(cls, options, parameters_as_bucket_view=view)
    zero.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.03
    step_both(zero, plain, own, other, 3)
    sharded, whole = consolidated(zero), plain.state_dict()
    assert_state_dicts_equal(sharded, whole)
    # Each continues from the other's checkpoint.
    zero = Zero(own, cls, parameters_as_bucket_view=view, **{**options, "lr": 77.0})
    continued = cls(other, **{**options, "lr": 77.0})
    given = copy.deepcopy(whole)
    zero.load_state_dict(whole)
    continued.load_state_dict(sharded)
    assert zero.param_groups[0]["lr"] == zero.optim.param_groups[0]["lr"] == 0.03
    step_both(zero, continued, own, other, 3, start=3)
    assert_state_dicts_equal(whole, given)


@case
def shares_are_consolidated_without_pickle():
    zero, _, own, _ = pair(*OPTIMIZERS["adam"])
    set_gradients(own, 0)
    zero.step()
    with unpickling_is_an_error():
        zero.consolidate_state_dict()


@case
def state_dict_needs_consolidation_on_the_asking_rank():
    zero, _, own, _ = pair(*OPTIMIZERS["adam"])
    raises(RuntimeError, r"consolidate_state_dict\(to=", zero.state_dict)
    set_gradients(own, 0)
    zero.step()
    zero.consolidate_state_dict(to=SIZE - 1)
    if RANK == SIZE - 1:
        first = zero.state_dict()
        assert set(first) == {"state", "param_groups", "partition"}
        kept = copy.deepcopy(first)
        first["state"][0]["exp_avg"].fill_(7)  # it is the caller's
        assert_state_dicts_equal(zero.state_dict(), kept)
        zero.load_state_dict(kept)
    else:
        zero.load_state_dict(torch.optim.Adam(twin(own)).state_dict())
    raises(RuntimeError, "holds only its own share", zero.state_dict)


@case
def ranks_that_name_another_target_get_an_error():
    zero, _, own, _ = pair(*OPTIMIZERS["adam"])
    for wrong in (SIZE, -1):
        raises(ConfigError, "ranks are 0 to", lambda: zero.consolidate_state_dict(to=wrong))  # noqa: B023
        one = wrong if RANK == 1 else 0
        raises(ConfigError, f"to={wrong}, but", lambda: zero.consolidate_state_dict(to=one))  # noqa: B023
    raises(ConfigError, "the same rank everywhere", lambda: zero.consolidate_state_dict(to=RANK))
    if RANK == 0:
        set_gradients(own, 0)
        zero.optim.state[next(p for g in zero.optim.param_groups for p in g["params"])]["history"] = object()
    raises(ConfigError, "the state of Adam holds a object", zero.consolidate_state_dict)


@case
def loading_another_model_or_no_state_dict_is_refused():
    zero, *_ = pair(*OPTIMIZERS["adam"])
    other = torch.optim.Adam(parameters_of_sizes(3, 4)).state_dict()
    raises(LayoutError, "belongs to another model", lambda: zero.load_state_dict(other))
    groups = zero.local_state_dict()["param_groups"]
    for bad in ({}, None, [], {"param_groups": groups}, {"state": {}, "param_groups": [{}]}, {"state": None}):
        raises(LayoutError, "what state_dict.. returned", lambda: zero.load_state_dict(bad))  # noqa: B023
    raises(TypeError, "save state_dict", lambda: copy.deepcopy(zero))


@case
def shares_are_cut_out_of_the_whole_state():
    zero, plain, own, other = pair(*OPTIMIZERS["adamw"])
    step_both(zero, plain, own, other, 2)
    whole = consolidated(zero)
    share = Zero.rank_local_state_dict(RANK, whole)
    assert_state_dicts_equal(share, zero.local_state_dict())
    zero.optim.load_state_dict(share)
    raises(ValueError, "ranks 0 to", lambda: Zero.rank_local_state_dict(SIZE, whole))
    raises(ValueError, "no 'partition'", lambda: Zero.rank_local_state_dict(0, plain.state_dict()))


# -- errors


@case
def constructor_errors():
    p, q, sgd = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2).double()), torch.optim.SGD
    bad = [
        (ValueError, "empty parameter list", [[], sgd]),
        (TypeError, "iterable of Tensors or dicts", [torch.zeros(3), sgd]),
        (TypeError, "not iterable", [12, sgd]),
        (TypeError, "can only optimize Tensors", [[p, {"params": [p]}], sgd]),
        (TypeError, "must be a dict", [[{"params": [p]}, p], sgd]),
        (TypeError, "can only optimize Tensors", [[p, 12], sgd]),
        (TypeError, "can only optimize Tensors", [[{"params": ["x"]}], sgd]),
        (TypeError, "set", [[{"params": {p}}], sgd]),
        (TypeError, "set", [{p}, sgd]),
        (ValueError, "no 'params'", [[{"lr": 0.1}], sgd]),
        (ValueError, "only dense", [[torch.zeros(3).to_sparse()], sgd]),
        (ValueError, "is complex", [[nn.Parameter(torch.zeros(3, dtype=torch.complex64))], sgd]),
        (ValueError, "build one optimizer for each type", [[p, q], sgd]),
        (ValueError, "more than one parameter group", [[{"params": [p]}, {"params": [p]}], sgd]),
        (ValueError, "in the same memory", [[p, nn.Parameter(p.data)], sgd]),
        (ValueError, "functional", [[p], nn.Linear]),
        (TypeError, "give a class", [[p], sgd([p])]),
        (TypeError, "give a class", [[p]]),
        (ValueError, "LBFGS", [[p], torch.optim.LBFGS]),
        (ValueError, "averages gradients itself", [[p], dgc.DGCMomentum]),
        (ValueError, "cannot be sharded again", [[p], Zero]),
    ]
    for error, match, arguments in bad:
        raises(error, match, lambda: Zero(*arguments, lr=0.1))  # noqa: B023
    raises(TypeError, "nonsense", lambda: Zero([p], sgd, lr=0.1, nonsense=1))
    raises(ValueError, "overlap_with_ddp", lambda: Zero([p], sgd, overlap_with_ddp=True, lr=0.1))
    raises(TypeError, "give a torch.distributed process group", lambda: Zero([p], sgd, group="world", lr=0.1))
    raises(ValueError, "mean the same", lambda: Zero([p], sgd, group="x", process_set="x"))
    Zero((each for each in [p]), sgd, lr=0.1)
    assert Zero([("a", p)], sgd, lr=0.1).param_groups[0]["param_names"] == ["a"]


@case
def ranks_that_disagree_get_the_same_error():
    own, sgd, other = parameters_of_sizes(3, 4), torch.optim.SGD, RANK == SIZE - 1
    for match, build in (
        ("'group 0 parameter 1' is", lambda: Zero(parameters_of_sizes(3, 4 + other), sgd)),
        ("optimizer_class", lambda: Zero(own, torch.optim.Adam if other else sgd, lr=0.1)),
        ("'option lr' is 0.1", lambda: Zero(own, sgd, lr=0.1 + other)),
        ("'group 0 option lr' is 0.1", lambda: Zero([{"params": own, "lr": 0.1 + other}], sgd)),
        ("parameters_as_bucket_view", lambda: Zero(own, sgd, parameters_as_bucket_view=other)),
        ("empty parameter list", lambda: Zero([] if other else own, sgd, lr=0.1)),
    ):
        raises((LayoutError, RemoteError, ValueError), match, build)


@case
def a_failing_update_reaches_all_ranks_and_the_next_step_makes_them_equal():
    zero, _, own, _ = pair(*OPTIMIZERS["sgd"])

    def closure(step, fails):
        def evaluate():
            if fails and RANK == 1:
                raise KeyError("no more data")
            set_gradients(own, step)

        return evaluate

    zero.step(closure(0, False))
    for step in (1, 2):
        raises(KeyError if RANK == 1 else RemoteError, "no more data", lambda: zero.step(closure(step, True)))  # noqa: B023
    zero.step(closure(3, False))
    assert_replicas_identical(own)


@case
def options_groups_and_states_that_drift_apart_are_errors_everywhere():
    other = RANK == SIZE - 1
    zero, plain, own, _ = pair(*OPTIMIZERS["adam"])

    def step():
        set_gradients(own, 0)
        zero.step()

    step()
    zero.param_groups[0]["lr"] = 0.5 + other
    raises(LayoutError, "group 0 option lr", step)
    zero.param_groups[0]["lr"] = 0.5
    step()
    assert_replicas_identical(own)
    if other:
        zero.load_state_dict(plain.state_dict())
    raises(LayoutError, "group 0 option lr|states loaded", step)
    if not other:
        zero.load_state_dict(plain.state_dict())
    step()
    if other:
        zero.add_param_group({"params": parameters_of_sizes(3)})
    raises(LayoutError, "group 1", step)
    own = make_parameters()
    zero = Zero(own, torch.optim.SGD, lr=0.1)
    if other:
        zero.param_groups[0]["params"].pop()
    raises((LayoutError, RemoteError), "by hand", step)
