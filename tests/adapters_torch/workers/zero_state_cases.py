"""On real ranks: groups of the sharded optimizer, its checkpoints, and plain optimizers' checkpoints."""

from __future__ import annotations

import itertools

import horovod.torch as hvd
import torch
from worker_tools import case, run_cases
from zero_tools import (
    OPTIMIZERS,
    assert_bits_equal,
    assert_replicas_identical,
    assert_state_dicts_equal,
    frozen_copy,
    make_model,
    pair,
    parameters_of_sizes,
    raises,
    set_mean_gradients,
    step_both,
    twin,
)

from dgc.core.errors import ConfigError
from dgc.torch.zero import ZeroRedundancyOptimizer as Zero


@case
def groups_given_at_once_or_added_later():
    for views, frozen in itertools.product((False, True), (False, True)):
        kinds = [{"lr": 0.01}, {"lr": 0.02, "weight_decay": 0.3}, {"betas": (0.5, 0.6)}]
        upfront, later, other = (list(make_model().parameters()) for _ in range(3))
        for parameters in (upfront, later, other):
            parameters[3].requires_grad_(not frozen)
        split = lambda ps: [ps[:2], ps[2:5], ps[5:]]  # noqa: E731
        whole = Zero(
            [{"params": ps, **o} for ps, o in zip(split(upfront), kinds, strict=True)],
            torch.optim.AdamW,
            parameters_as_bucket_view=views,
        )
        grown = Zero(split(later)[0], torch.optim.AdamW, parameters_as_bucket_view=views, **kinds[0])
        for ps, o in list(zip(split(later), kinds, strict=True))[1:]:
            grown.add_param_group({"params": ps, "lr": 0.01 if "lr" not in o else o["lr"], **o})
        kinds[2]["lr"] = 0.01
        whole.param_groups[2]["lr"] = 0.01
        plain = torch.optim.AdamW([{"params": ps, **o} for ps, o in zip(split(other), kinds, strict=True)])
        for step in range(4):
            for optimizer, parameters in ((whole, upfront), (grown, later), (plain, other)):
                set_mean_gradients(parameters, step)
                optimizer.step()
        assert_bits_equal(upfront, other)
        assert_bits_equal(later, other)
        assert_replicas_identical(later)


@case
def a_group_added_in_the_middle_keeps_old_state():
    for views in (False, True):
        own = list(make_model().parameters())
        other = twin(own)
        zero = Zero(own[:3], torch.optim.Adam, lr=0.01, parameters_as_bucket_view=views)
        plain = torch.optim.Adam(other[:3], lr=0.01)
        step_both(zero, plain, own[:3], other[:3], 3)
        before = [[list(map(id, g["params"])) for g in groups] for groups in zero.partition_parameters()]
        zero.add_param_group({"params": own[3:], "lr": 0.05})
        plain.add_param_group({"params": other[3:], "lr": 0.05})
        after = [[list(map(id, g["params"])) for g in groups] for groups in zero.partition_parameters()]
        assert [groups[:1] for groups in after] == before
        step_both(zero, plain, own, other, 3, start=5)


@case
def state_dict_needs_consolidation_on_the_asking_rank():
    zero, _, own, _ = pair(*OPTIMIZERS["adam"])
    raises(RuntimeError, r"consolidate_state_dict\(to=", zero.state_dict)
    set_mean_gradients(own, 0)
    zero.step()
    last = hvd.size() - 1
    zero.consolidate_state_dict(to=last)
    if hvd.rank() == last:
        assert set(zero.state_dict()) == {"state", "param_groups", "partition"}
    else:
        raises(RuntimeError, "holds only its own share", zero.state_dict)
    raises(ConfigError, "ranks are 0 to", lambda: zero.consolidate_state_dict(to=hvd.size()))


@case
def state_dict_equals_the_unsharded_one():
    for cls, options in OPTIMIZERS.values():
        zero, plain, own, other = pair(cls, options)
        zero.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.03
        step_both(zero, plain, own, other, 2)
        zero.consolidate_state_dict()
        if hvd.rank() == 0:
            assert_state_dicts_equal(zero.state_dict(), plain.state_dict())


def _on_every_rank(value):
    return hvd.broadcast_object(value, root_rank=0, name="checkpoint")


@case
def checkpoints_load_both_ways():
    for (cls, options), views in itertools.product(OPTIMIZERS.values(), (False, True)):
        zero, plain, own, other = pair(cls, options, parameters_as_bucket_view=views)
        zero.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.03
        step_both(zero, plain, own, other, 3)
        zero.consolidate_state_dict()
        sharded = _on_every_rank(zero.state_dict() if hvd.rank() == 0 else None)
        # Each continues from the other's checkpoint.
        zero = Zero(own, cls, parameters_as_bucket_view=views, **{**options, "lr": 77.0})
        continued = cls(other, **{**options, "lr": 77.0})
        whole = plain.state_dict()
        given = frozen_copy(whole)
        zero.load_state_dict(whole)
        continued.load_state_dict(sharded)
        assert zero.param_groups[0]["lr"] == zero.optim.param_groups[0]["lr"] == 0.03
        step_both(zero, continued, own, other, 3, start=3)
        assert_state_dicts_equal(whole, given)


@case
def loading_moves_state_to_the_parameters_device_and_type():
    zero, plain, own, other = pair(*OPTIMIZERS["adam"])
    step_both(zero, plain, own, other, 1)
    saved = plain.state_dict()
    for entry in saved["state"].values():
        entry["exp_avg"] = entry["exp_avg"].double()
    zero.load_state_dict(saved)
    for state in zero.optim.state.values():
        assert state["exp_avg"].dtype is torch.float32
        assert state["step"].ndim == 0
        assert state["step"].device.type == "cpu"


@case
def loading_another_model_is_refused():
    zero, *_ = pair(*OPTIMIZERS["adam"])
    others = torch.optim.Adam(parameters_of_sizes(3, 4))
    raises(ValueError, "belongs to another model", lambda: zero.load_state_dict(others.state_dict()))


@case
def shares_are_cut_out_of_the_whole_state():
    zero, plain, own, other = pair(*OPTIMIZERS["adamw"])
    step_both(zero, plain, own, other, 2)
    zero.consolidate_state_dict()
    whole = _on_every_rank(zero.state_dict() if hvd.rank() == 0 else None)
    share = Zero.rank_local_state_dict(hvd.rank(), whole)
    local = zero.local_state_dict()
    assert_state_dicts_equal(share, local)
    zero.optim.load_state_dict(share)
    raises(ValueError, "ranks 0 to", lambda: Zero.rank_local_state_dict(hvd.size(), whole))
    raises(ValueError, "no 'partition'", lambda: Zero.rank_local_state_dict(0, plain.state_dict()))


if __name__ == "__main__":
    hvd.init()
    run_cases()
