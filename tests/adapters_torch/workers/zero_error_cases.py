"""On real ranks: what the sharded optimizer refuses, on every rank and without waiting."""

from __future__ import annotations

import warnings

import horovod.torch as hvd
import torch
from torch import nn
from worker_tools import case, run_cases
from zero_tools import (
    make_model,
    parameters_of_sizes,
    raises,
    set_mean_gradients,
)

from dgc.core.errors import LayoutError, RemoteError
from dgc.torch.zero import ZeroRedundancyOptimizer as Zero


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
    raises(LayoutError, "'lr' is", lambda: Zero(parameters_of_sizes(3), torch.optim.SGD, lr=0.1 + rank))
    kind = torch.optim.Adam if rank else torch.optim.SGD
    raises(LayoutError, "optimizer_class", lambda: Zero(parameters_of_sizes(3), kind, lr=0.1))
    # One rank's own error reaches the others.
    params = [] if rank == 1 else parameters_of_sizes(3)
    raises(ValueError, "empty parameter list", lambda: Zero(params, torch.optim.SGD, lr=0.1))


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
def a_failing_fused_update_reaches_all_ranks():
    from dgc.torch.fuse import fuse_optimizer, fuse_step

    own = list(make_model().parameters())
    zero = Zero(own, torch.optim.SGD, lr=0.1)
    fuse_optimizer(zero)

    def closure():
        if hvd.rank() == 1:
            raise KeyError("no more data")
        set_mean_gradients(own, 0)

    error = KeyError if hvd.rank() == 1 else RemoteError
    raises(error, "no more data", lambda: fuse_step(zero, closure))

    def broken_update(*_):
        if hvd.rank() == 1:
            raise KeyError("no more memory")

    zero.optim.register_step_pre_hook(broken_update)
    set_mean_gradients(own, 1)
    raises(error, "no more memory", lambda: fuse_step(zero))


@case
def unpicklable_state_fails_on_all_ranks():
    own = parameters_of_sizes(4, 5, 6, 7)
    zero = Zero(own, torch.optim.SGD, lr=0.1)
    if hvd.rank() == 0:
        zero.optim.state[next(p for g in zero.optim.param_groups for p in g["params"])]["bad"] = lambda: 0
    error = raises(Exception, "pickle", zero.consolidate_state_dict)
    assert isinstance(error, RemoteError) == (hvd.rank() != 0)


if __name__ == "__main__":
    hvd.init()
    run_cases()
