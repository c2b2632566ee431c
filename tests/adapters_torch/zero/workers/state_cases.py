"""On real ranks: groups of the sharded optimizer, its checkpoints, and plain optimizers' checkpoints."""

from __future__ import annotations

import itertools
import sys

import horovod.torch as hvd
import torch
from worker_tools import case, report, run_cases
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

from dgc.errors import ConfigError, LayoutError, RemoteError
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


@case
def ranks_that_name_another_target_get_an_error():
    zero, _, own, _ = pair(*OPTIMIZERS["adam"])
    set_mean_gradients(own, 0)
    zero.step()
    for wrong in (hvd.size(), -1):
        raises(ConfigError, "ranks are 0 to", lambda: zero.consolidate_state_dict(to=wrong))  # noqa: B023
        one = wrong if hvd.rank() == 1 else 0
        raises(ConfigError, f"to={wrong}, but .*ranks are 0 to", lambda: zero.consolidate_state_dict(to=one))  # noqa: B023
    raises((TypeError, RemoteError), "integer", lambda: zero.consolidate_state_dict(to="0" if hvd.rank() else 0))
    wrong = "0 on rank 0(,| and) 1 on rank 1.*the same rank everywhere"
    raises(ConfigError, wrong, lambda: zero.consolidate_state_dict(to=hvd.rank()))
    zero.consolidate_state_dict()


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
def what_is_no_state_dict_is_refused():
    zero, *_ = pair(*OPTIMIZERS["adam"])
    groups = zero.local_state_dict()["param_groups"]
    for bad in ({}, None, [], {"param_groups": groups}, {"state": {}, "param_groups": [{}]}, {"state": None}):
        raises(LayoutError, "what state_dict.. returned", lambda: zero.load_state_dict(bad))  # noqa: B023


@case
def a_state_dict_belongs_to_the_caller():
    """Neither later steps, nor loading, nor who uses it changes it; and changing it changes nothing here."""
    own = list(make_model().parameters())
    zero = Zero(own, torch.optim.Adam, lr=torch.tensor(0.01), foreach=False)
    set_mean_gradients(own, 0)
    zero.step()
    zero.consolidate_state_dict()
    if hvd.rank() == 0:
        first = zero.state_dict()
        kept = frozen_copy(first)
        other = twin(own)
        plain = torch.optim.Adam(other)
        plain.load_state_dict(first)
        set_mean_gradients(other, 1)
        plain.step()
        first["state"][0]["exp_avg"].fill_(7)
        first["param_groups"][0]["lr"].fill_(7)
        first["partition"][0][0].clear()
        assert_state_dicts_equal(zero.state_dict(), kept)
        assert zero.state_dict()["partition"] == kept["partition"]
    kept = _on_every_rank(kept if hvd.rank() == 0 else None)
    saved = frozen_copy(kept)
    set_mean_gradients(own, 1)
    zero.step()
    assert_replicas_identical(own)
    zero.load_state_dict(kept)
    raises(RuntimeError, "holds only its own share", zero.state_dict)
    zero.step()
    assert_state_dicts_equal(kept, saved)


@case
def state_dict_hooks_see_the_whole():
    own = list(make_model().parameters())
    zero = Zero(own, torch.optim.Adam, lr=0.01)
    seen = []
    zero.register_state_dict_pre_hook(lambda optimizer: seen.append(optimizer is zero))
    zero.register_state_dict_post_hook(lambda _, full: seen.append((len(full["state"]), sorted(full))))
    zero.register_state_dict_post_hook(lambda _, full: {**full, "mine": 1})
    zero.register_load_state_dict_pre_hook(lambda _, full: {k: v for k, v in full.items() if k != "mine"})
    zero.register_load_state_dict_pre_hook(lambda _, full: seen.append((len(full["state"]), sorted(full))))
    zero.register_load_state_dict_post_hook(lambda optimizer: seen.append(len(optimizer.optim.state) > 0))
    set_mean_gradients(own, 0)
    zero.step()
    zero.consolidate_state_dict()
    whole = _on_every_rank(zero.state_dict() if hvd.rank() == 0 else None)
    assert whole["mine"] == 1
    zero.load_state_dict(whole)
    keys = (len(own), ["param_groups", "partition", "state"])
    assert seen == ([True, keys] if hvd.rank() == 0 else []) + [keys, True], seen
    assert "mine" in whole


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


def save_or_continue(action, path):
    """One job trains and saves; another, of another size, continues and compares with an unsharded run."""
    for name, (cls, options) in OPTIMIZERS.items():
        file = f"{path}/{name}.pt"
        zero, plain, own, other = pair(cls, options)
        if action == "save":
            step_both(zero, plain, own, other, 3)
            zero.consolidate_state_dict()
            if hvd.rank() == 0:
                torch.save([own, zero.state_dict(), plain.state_dict()], file)
            continue
        for first, second in ((1, 2), (2, 1)):
            saved = torch.load(file)
            with torch.no_grad():
                for p, q, value in zip(own, other, saved[0], strict=True):
                    p.copy_(value)
                    q.copy_(value)
            zero.load_state_dict(saved[first])
            plain.load_state_dict({k: v for k, v in saved[second].items() if k != "partition"})
            step_both(zero, plain, own, other, 3, start=3)
        report(name)


if __name__ == "__main__":
    hvd.init()
    if sys.argv[1:2] in (["save"], ["continue"]):
        save_or_continue(*sys.argv[1:])
    else:
        run_cases()
