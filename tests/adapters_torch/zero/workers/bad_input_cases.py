"""On real ranks: what the sharded optimizer refuses, on every rank and without waiting."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import horovod.torch as hvd
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from worker_tools import case, run_cases
from zero_tools import (
    assert_bits_equal,
    assert_replicas_identical,
    make_model,
    parameters_of_sizes,
    raises,
    set_mean_gradients,
    twin,
)

import dgc.torch as dgc
from dgc.errors import ConfigError, LayoutError, RemoteError
from dgc.torch.zero import ZeroRedundancyOptimizer as Zero
from dgc.torch.zero import ranks

ranks._PATIENCE = 100.0  # a busy machine may be slow to bring the other rank


@case
def constructor_errors_come_before_any_waiting():
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2).double())
    bad = [
        (ValueError, "empty parameter list", lambda: Zero([], torch.optim.SGD, lr=0.1)),
        (TypeError, "single Tensor", lambda: Zero(torch.zeros(3), torch.optim.SGD, lr=0.1)),
        (TypeError, "iterable", lambda: Zero(12, torch.optim.SGD, lr=0.1)),
        (TypeError, "mixes", lambda: Zero([p, {"params": [p]}], torch.optim.SGD, lr=0.1)),
        (TypeError, "mixes", lambda: Zero([{"params": [p]}, p], torch.optim.SGD, lr=0.1)),
        (TypeError, "can only optimize tensors", lambda: Zero([p, 12], torch.optim.SGD, lr=0.1)),
        (TypeError, "can only optimize tensors", lambda: Zero([{"params": ["x"]}], torch.optim.SGD, lr=0.1)),
        (TypeError, "set", lambda: Zero([{"params": {p}}], torch.optim.SGD, lr=0.1)),
        (TypeError, "set", lambda: Zero({p}, torch.optim.SGD, lr=0.1)),
        (TypeError, "set", lambda: Zero(frozenset([("a", p)]), torch.optim.SGD, lr=0.1)),
        (TypeError, "tuple of 1", lambda: Zero([(p,)], torch.optim.SGD, lr=0.1)),
        (TypeError, "tuple of 3", lambda: Zero([("a", p, 3)], torch.optim.SGD, lr=0.1)),
        (ValueError, "no 'params'", lambda: Zero([{"lr": 0.1}], torch.optim.SGD, lr=0.1)),
        (ValueError, "only dense", lambda: Zero([torch.zeros(3).to_sparse()], torch.optim.SGD, lr=0.1)),
        (
            ValueError,
            "build one optimizer for each",
            lambda: Zero([p, q], torch.optim.SGD),
        ),
        (
            ValueError,
            "more than one parameter group",
            lambda: Zero([{"params": [p]}, {"params": [p]}], torch.optim.SGD),
        ),
        (ValueError, "functional", lambda: Zero([p], nn.Linear, lr=0.1)),
        (TypeError, "give a class", lambda: Zero([p], torch.optim.SGD([p]), lr=0.1)),
        (TypeError, "needs optimizer_class", lambda: Zero([p], lr=0.1)),
        (TypeError, "nonsense", lambda: Zero([p], torch.optim.SGD, lr=0.1, nonsense=1)),
        (ValueError, "overlap_with_ddp", lambda: Zero([p], torch.optim.SGD, overlap_with_ddp=True, lr=0.1)),
        (ValueError, "LBFGS", lambda: Zero([p], torch.optim.LBFGS)),
        (ValueError, "transport must be one of", lambda: Zero([p], torch.optim.SGD, lr=0.1, transport="bogus")),
        (TypeError, "ProcessSet", lambda: Zero([p], torch.optim.SGD, group="world", lr=0.1)),
        (
            ValueError,
            "mean the same",
            lambda: Zero([p], torch.optim.SGD, group=hvd.global_process_set, process_set=hvd.global_process_set),
        ),
    ]
    for error, match, build in bad:
        raises(error, match, build)
    Zero((each for each in [p]), torch.optim.SGD, lr=0.1)
    named = Zero(make_model().named_parameters(), torch.optim.SGD, lr=0.1)
    assert named.param_groups[0]["param_names"][0] == "0.weight"
    zero = Zero([p], torch.optim.SGD, lr=0.1)
    raises(TypeError, "must be a dict", lambda: zero.add_param_group([p]))
    raises(ValueError, "build one optimizer for each", lambda: zero.add_param_group({"params": [q]}))


@case
def ranks_that_disagree_get_the_same_error():
    rank = hvd.rank()
    shapes = (3, 4) if rank else (3, 5)
    error = raises(
        LayoutError, r"'group 0 parameter 1' is", lambda: Zero(parameters_of_sizes(*shapes), torch.optim.SGD)
    )
    assert "(5,)" in str(error)
    assert "(4,)" in str(error)
    kind = torch.optim.Adam if rank else torch.optim.SGD
    raises(LayoutError, "optimizer_class", lambda: Zero(parameters_of_sizes(3), kind, lr=0.1))
    # A name that two parameters bear hides neither.
    raises(
        LayoutError,
        r"'group 0 parameter 0 \(a\)' is",
        lambda: Zero([("a", p) for p in parameters_of_sizes(4 + rank, 3)], torch.optim.SGD),
    )


@case
def options_that_differ_get_the_same_error():
    own, rank, sgd = parameters_of_sizes(3, 4), hvd.rank(), torch.optim.SGD
    named = [("lr", own[0]), ("b", own[1])]
    split = [{"params": named[:1]}, {"params": named[1:]}]
    betas = (0.5, 0.9) if rank else (0.9, 0.999)
    for match, build in (
        ("'option lr' is 0.1 on rank 0", lambda: Zero(own, sgd, lr=0.1 + rank)),
        ("'option lr' is 0.1", lambda: Zero(named, sgd, lr=0.1 + rank)),
        ("'option lr' is 0.5", lambda: Zero(own, torch.optim.Adam, lr=torch.tensor(0.5 + rank))),
        ("'group 0 option lr' is 0.1", lambda: Zero([{"params": own, "lr": 0.1 + rank}], sgd)),
        (
            r"'group 0 option betas' is \[0.9, 0.999\]",
            lambda: Zero([{"params": own, "betas": betas}], torch.optim.Adam),
        ),
        (r"'group 1 parameter 0 \(b\)' is", lambda: Zero([{"params": named}] if rank else split, sgd)),
        ("'transport' is", lambda: Zero(own, sgd, transport="mpi" if rank else "horovod")),
        ("'sparse_parameters' is", lambda: Zero(own, sgd, sparse_parameters=bool(rank))),
        ("'parameters_as_bucket_view' is", lambda: Zero(own, sgd, parameters_as_bucket_view=bool(rank))),
    ):
        raises(LayoutError, match, build)


@case
def one_ranks_own_error_reaches_the_others():
    own, other, sgd = parameters_of_sizes(3), hvd.rank() == 1, torch.optim.SGD
    raises(ValueError, "empty parameter list", lambda: Zero([] if other else own, sgd, lr=0.1))
    raises(ValueError, "transport must be one", lambda: Zero(own, sgd, transport="bogus" if other else "auto"))
    raises(ValueError, "one of them", lambda: Zero(own, sgd, **_doubled(other)))
    error = raises((TypeError, RemoteError), "ProcessSet", lambda: Zero(own, sgd, group="x" if other else None))
    assert isinstance(error, TypeError) == other


def _doubled(wrong):
    return dict.fromkeys(("group", "process_set") if wrong else ("group",), hvd.global_process_set)


@case
def classes_that_exchange_or_shard_themselves_are_refused():
    own = parameters_of_sizes(20, 20)
    wrapped = type(hvd.DistributedOptimizer(torch.optim.SGD(parameters_of_sizes(3), lr=0.1)))
    raises(ConfigError, "DGCMomentum averages", lambda: Zero(own, dgc.DGCMomentum, lr=0.1, momentum=0.9))
    raises(ConfigError, "averages gradients itself", lambda: Zero(own, wrapped, lr=0.1))
    raises(ConfigError, "cannot be sharded again", lambda: Zero(own, Zero, lr=0.1))
    raises(ConfigError, "cannot be sharded again", lambda: Zero(own, TorchZero))


class _Lamb(torch.optim.SGD):
    def __init__(self, params, max_grad_norm, pre_norm=None):
        super().__init__(params)
        if pre_norm is not None:
            self.pre_norm = pre_norm
        self.defaults["max_grad_norm"] = max_grad_norm
        for group in self.param_groups:
            group.setdefault("max_grad_norm", max_grad_norm)


@case
def a_limit_for_the_norm_of_all_gradients_is_refused():
    own = parameters_of_sizes(20, 20)
    for options in ({"max_grad_norm": 1.0}, {"max_grad_norm": 1.0, "pre_norm": True}):
        raises(ConfigError, "_Lamb has max_grad_norm=1.0.*clip_grad_norm_", lambda: Zero(own, _Lamb, **options))  # noqa: B023
    for options in ({"max_grad_norm": 0.0}, {"max_grad_norm": None}, {"max_grad_norm": 1.0, "pre_norm": False}):
        Zero(own, _Lamb, **options)
    zero = Zero(own[:1], _Lamb, max_grad_norm=None)
    group = {"params": own[1:], "max_grad_norm": 2.0}
    raises(ConfigError, "_Lamb has max_grad_norm=2.0", lambda: zero.add_param_group(group))
    assert len(zero.param_groups) == len(zero.optim.param_groups) == 1
    Zero([group], torch.optim.Adam)  # to torch's it is somebody else's note


class _OwnStepSize(torch.optim.SGD):
    """Keeps a step size and a counter among the options, as D-Adaptation does; its size is a norm of the gradients."""

    def __init__(self, params, lr, looks=True):
        super().__init__(params, lr=lr)
        self.looks = looks
        for group in self.param_groups:
            group.update(d=0.0, k=0)

    def step(self):
        for group in self.param_groups:
            gradients = [p.grad.norm() for p in group["params"] if self.looks]
            group["d"], group["k"] = max([group["d"], *map(float, gradients)]), group["k"] + 1
        super().step()


@case
def an_update_that_sets_options_from_its_share_is_an_error_everywhere():
    own = list(make_model().parameters())
    zero = Zero(own, _OwnStepSize, lr=0.1)
    for step in range(2):
        set_mean_gradients(own, step)
        raises(LayoutError, "'group 0 option d' is .* on rank 0.*update itself sets.*use it without", zero.step)
    counting = Zero(own, _OwnStepSize, lr=0.1, looks=False)
    for step in range(2):
        set_mean_gradients(own, step)
        counting.step()
    assert counting.param_groups[0]["k"] == 2
    assert_replicas_identical(own)


@case
def torchs_join_is_refused():
    from torch.distributed.algorithms.join import Join

    zero = Zero(parameters_of_sizes(4, 5), torch.optim.SGD, lr=0.1)
    raises(ConfigError, "leave it out.*same number of steps", lambda: Join([zero]))


@case
def parameters_in_the_same_memory_are_refused():
    buffer, p = torch.arange(24.0), parameters_of_sizes(4)[0]
    part = lambda *where: nn.Parameter(buffer[slice(*where)])  # noqa: E731
    matrix = buffer.view(6, 4)
    for views in (False, True):
        build = lambda *ps: Zero(ps, torch.optim.SGD, lr=0.1, parameters_as_bucket_view=views)  # noqa: B023, E731
        raises(LayoutError, "listed twice in one group, at 0 and 2", lambda: build(p, part(0, 3), p))  # noqa: B023
        for pieces in ((part(0, 10), part(9, 12)), (part(0, 24), part(3, 5)), (part(0, 24, 2), part(1, 24, 3))):
            raises(LayoutError, "parameter number 1 and parameter number 2 lie in the same", lambda: build(p, *pieces))  # noqa: B023
    # What lies side by side or interleaved shares nothing; one Parameter in two modules is one parameter.
    Zero([part(0, 10), part(10, 24)], torch.optim.SGD, lr=0.1)
    Zero([part(0, 24, 2), part(1, 24, 2)], torch.optim.SGD, lr=0.1)
    zero = Zero([nn.Parameter(matrix[:, :2]), nn.Parameter(matrix[:3, 2:])], torch.optim.SGD, lr=0.1)
    raises(LayoutError, "lie in the same memory", lambda: zero.add_param_group({"params": [part(22, 24), part(2, 3)]}))
    zero.add_param_group({"params": [part(22, 24)]})
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    tied = nn.ModuleList([first, second])
    assert len(Zero(tied.parameters(), torch.optim.SGD, lr=0.1).param_groups[0]["params"]) == 1
    groups = [{"params": first.parameters()}, {"params": second.parameters()}]
    raises(ValueError, "more than one parameter group", lambda: Zero(groups, torch.optim.SGD, lr=0.1))


@case
def complex_parameters_are_refused():
    real, bad = parameters_of_sizes(3)[0], nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    for build in (
        lambda: Zero([("w", bad)], torch.optim.SGD, lr=0.1),
        lambda: Zero([real], torch.optim.SGD, lr=0.1).add_param_group({"params": [bad]}),
    ):
        raises(LayoutError, r"parameter number [01].* is complex.*view_as_real", build)


@case
def a_group_that_cannot_be_added_changes_nothing():
    class Picky(torch.optim.SGD):
        def add_param_group(self, group):
            super().add_param_group(group)
            if group["lr"] == 13:
                raise ValueError("unlucky")

    own = parameters_of_sizes(10, 12, 5, 6)
    zero = Zero(own[:2], Picky, lr=0.1)
    raises(ValueError, "unlucky", lambda: zero.add_param_group({"params": own[2:3], "lr": 13}))
    raises(LayoutError, "listed twice", lambda: zero.add_param_group({"params": own[2:3] * 2}))
    assert len(zero.param_groups) == len(zero.optim.param_groups) == 1
    zero.add_param_group({"params": own[2:], "lr": 0.2})
    other = twin(own)
    set_mean_gradients(own, 0)
    set_mean_gradients(other, 0)
    zero.step()
    torch.optim.SGD([{"params": other[:2]}, {"params": other[2:], "lr": 0.2}], lr=0.1).step()
    assert_bits_equal(own, other)
    assert_replicas_identical(own)


@case
def copies_and_pickles_are_refused_but_groups_are_plain():
    own = parameters_of_sizes(4, 5)
    zero = Zero(own, torch.optim.SGD, lr=0.1)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps, lambda z: torch.save(z, io.BytesIO())):
        raises(TypeError, r"save state_dict\(\)", lambda: copied(zero))  # noqa: B023
    for copied in (copy.copy, copy.deepcopy, lambda groups: pickle.loads(pickle.dumps(groups))):
        groups = copied(zero.param_groups)
        assert type(groups) is list
        assert groups[0]["lr"] == 0.1
        assert torch.equal(groups[0]["params"][1], own[1])


@case
def a_group_added_on_one_rank_only_is_an_error_everywhere():
    own = parameters_of_sizes(4, 5, 6)
    zero = Zero(own[:2], torch.optim.SGD, lr=0.1)
    if hvd.rank() == 1:
        zero.add_param_group({"params": own[2:]})
    set_mean_gradients(own, 0)
    raises(LayoutError, "group 1 parameter 0", zero.step)


@case
def a_parameter_frozen_on_one_rank_only_is_an_error_everywhere():
    own = parameters_of_sizes(4, 5)
    zero = Zero(own, torch.optim.SGD, lr=0.1)
    own[1].requires_grad_(hvd.rank() != 0)
    set_mean_gradients(own, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        raises(LayoutError, r"'group 0 parameter 1' is .*frozen.* on rank 0", zero.step)


@case
def a_failing_update_reaches_all_ranks():
    own = list(make_model().parameters())
    zero = Zero(own, torch.optim.SGD, lr=0.1)

    def closure():
        if hvd.rank() == 1:
            raise KeyError("no more data")
        set_mean_gradients(own, 0)

    raises(KeyError if hvd.rank() == 1 else RemoteError, "no more data", lambda: zero.step(closure))
    set_mean_gradients(own, 1)
    raises(KeyError if hvd.rank() == 1 else RemoteError, "no more data", lambda: zero.step(closure))


@case
def unpicklable_state_fails_on_all_ranks():
    own = parameters_of_sizes(4, 5, 6, 7)
    zero = Zero(own, torch.optim.SGD, lr=0.1)
    if hvd.rank() == 0:
        zero.optim.state[next(p for g in zero.optim.param_groups for p in g["params"])]["bad"] = lambda: 0
    error = raises(Exception, "pickle", zero.consolidate_state_dict)
    assert isinstance(error, RemoteError) == (hvd.rank() != 0)


if __name__ == "__main__":
    run_cases()
