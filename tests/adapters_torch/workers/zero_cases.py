"""On real ranks: the sharded optimizer against the unsharded one, bit for bit."""

from __future__ import annotations

import itertools
import warnings

import horovod.torch as hvd
import torch
from torch import nn
from worker_tools import SkipCase, case, run_cases
from zero_tools import (
    OPTIMIZERS,
    assert_bits_equal,
    assert_replicas_identical,
    assert_state_dicts_equal,
    frozen_copy,
    make_model,
    parameters_of_sizes,
    raises,
    set_mean_gradients,
    twin,
)

from dgc.core.errors import ConfigError, LayoutError, RemoteError
from dgc.torch.zero import ZeroRedundancyOptimizer as Zero


def _pair(cls, options, parameters=None, **zero_options):
    """A sharded optimizer and an unsharded one on copies of the same parameters."""
    own = list(make_model().parameters()) if parameters is None else parameters
    plain_parameters = twin(own)
    return Zero(own, cls, **zero_options, **options), cls(plain_parameters, **options), own, plain_parameters


def _step_both(zero, plain, own, other, steps, start=0, density=1.0):
    for step in range(start, start + steps):
        for optimizer, parameters in ((zero, own), (plain, other)):
            optimizer.zero_grad()
            set_mean_gradients(parameters, step, density=density)
            optimizer.step()
    assert_bits_equal(own, other)
    assert_replicas_identical(own)


@case
def same_bits_as_unsharded():
    for (cls, options), views, maximize in itertools.product(OPTIMIZERS.values(), (False, True), (False, True)):
        _step_both(*_pair(cls, {**options, "maximize": maximize}, parameters_as_bucket_view=views), 6)


@case
def same_bits_when_trainability_changes():
    for (cls, options), views in itertools.product(OPTIMIZERS.values(), (False, True)):
        zero, plain, own, other = _pair(cls, options, parameters_as_bucket_view=views)
        _step_both(zero, plain, own, other, 2)
        for number, trainable, steps in ((1, False, 2), (4, False, 2), (1, True, 3)):
            own[number].requires_grad_(trainable)
            other[number].requires_grad_(trainable)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                _step_both(zero, plain, own, other, steps, start=10 * number + trainable)
            assert ["frozen or unfrozen" in str(w.message) for w in caught] == [True]


@case
def a_frozen_parameter_with_an_old_gradient_is_updated_everywhere():
    """torch's optimizers go by the gradient, not by requires_grad."""
    for views in (False, True):
        zero, plain, own, other = _pair(*OPTIMIZERS["adam"], parameters_as_bucket_view=views)
        for parameters in (own, other):
            set_mean_gradients(parameters, 0)
            for p in parameters[:4]:
                p.requires_grad_(False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            zero.step()
        plain.step()
        assert_bits_equal(own, other)
        assert_replicas_identical(own)


@case
def only_the_owner_needs_gradients():
    zero, plain, own, other = _pair(*OPTIMIZERS["adamw"])
    mine = {id(p) for group in zero.partition_parameters()[hvd.rank()] for p in group["params"]}
    for step in range(3):
        set_mean_gradients(own, step)
        set_mean_gradients(other, step)
        for p in own:
            if id(p) not in mine:
                p.grad = None
        zero.step()
        plain.step()
    assert_bits_equal(own, other)


@case
def shards_are_balanced():
    sizes = [n for n in (9, 7, 5, 3) for _ in range(hvd.size())]
    zero = Zero(parameters_of_sizes(*sizes), torch.optim.SGD, lr=0.1)
    sums = [sum(p.numel() for g in groups for p in g["params"]) for groups in zero.partition_parameters()]
    assert sums == [24] * hvd.size(), sums
    if hvd.size() == 2:
        owned = Zero(parameters_of_sizes(9, 7, 5, 3, 2), torch.optim.SGD, lr=0.1).partition_parameters()
        assert [[p.numel() for g in groups for p in g["params"]] for groups in owned] == [[9, 3, 2], [7, 5]]


@case
def state_is_held_for_the_own_share_only():
    zero, *_, own, _ = _pair(*OPTIMIZERS["adam"])
    set_mean_gradients(own, 0)
    zero.step()
    mine = [p for g in zero.partition_parameters()[hvd.rank()] for p in g["params"]]
    assert set(map(id, zero.optim.state)) == set(map(id, mine))
    assert not zero.state
    assert set(zero.local_state_dict()["state"]) == set(range(len(mine)))


@case
def fewer_parameters_than_ranks():
    for views in (False, True):
        zero, plain, own, other = _pair(
            *OPTIMIZERS["adam"], parameters=parameters_of_sizes(5), parameters_as_bucket_view=views
        )
        _step_both(zero, plain, own, other, 3)
        zero.consolidate_state_dict(to=hvd.size() - 1)
        if hvd.rank() == hvd.size() - 1:
            assert list(zero.state_dict()["state"]) == [0]


@case
def closure_is_evaluated_once_and_its_loss_returned():
    for views in (False, True):
        zero, plain, own, other = _pair(*OPTIMIZERS["sgd"], parameters_as_bucket_view=views)
        calls = []

        def closure(parameters, tag, step, calls=calls):
            def evaluate():
                calls.append(tag)
                set_mean_gradients(parameters, step)
                return torch.tensor(4.5 + step)

            return evaluate

        for step in range(3):
            assert zero.step(closure(own, "zero", step)).item() == 4.5 + step
            assert plain.step(closure(other, "plain", step)).item() == 4.5 + step
        assert calls == ["zero", "plain"] * 3
        assert_bits_equal(own, other)
        assert_replicas_identical(own)


class _Unusual(torch.optim.SGD):
    """A step without closure, with an argument, that adds an option of its own."""

    def step(self, kwarg=None):
        super().step()
        for group in self.param_groups:
            group["seen"] = kwarg


@case
def step_arguments_and_new_options_pass_through():
    own = list(make_model().parameters())
    zero = Zero(own, _Unusual, lr=0.1)
    set_mean_gradients(own, 0)
    assert zero.step(kwarg=7) is None
    assert zero.param_groups[0]["seen"] == 7
    zero.step()
    assert zero.param_groups[0]["seen"] is None


@case
def zero_grad_covers_everything():
    zero, _, own, _ = _pair(*OPTIMIZERS["sgd"])
    set_mean_gradients(own, 0)
    zero.zero_grad()
    assert all(p.grad is None for p in own)


@case
def options_flow_both_ways():
    zero, _, own, _ = _pair(*OPTIMIZERS["adam"])
    assert zero.param_groups[0]["eps"] == 1e-8
    assert zero.defaults["betas"] == (0.8, 0.95)
    zero.param_groups[0]["lr"] = 0.5
    zero.param_groups[0]["mine"] = "note"
    set_mean_gradients(own, 0)
    zero.step()
    assert zero.optim.param_groups[0]["lr"] == 0.5
    assert zero.optim.param_groups[0]["mine"] == "note"


@case
def schedulers_work():
    schedulers = [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 3), torch.optim.lr_scheduler.StepLR(o, 2, 0.5)],
            milestones=[3],
        ),
    ]
    for make, (cls, options) in itertools.product(schedulers, OPTIMIZERS.values()):
        zero, plain, own, other = _pair(cls, options)
        pair = make(zero), make(plain)
        for step in range(8):
            _step_both(zero, plain, own, other, 1, start=step)
            for scheduler in pair:
                scheduler.step()
            assert zero.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


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
            torch.optim.AdamW, parameters_as_bucket_view=views,
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
        _step_both(zero, plain, own[:3], other[:3], 3)
        before = [[list(map(id, g["params"])) for g in groups] for groups in zero.partition_parameters()]
        zero.add_param_group({"params": own[3:], "lr": 0.05})
        plain.add_param_group({"params": other[3:], "lr": 0.05})
        after = [[list(map(id, g["params"])) for g in groups] for groups in zero.partition_parameters()]
        assert [groups[:1] for groups in after] == before
        _step_both(zero, plain, own, other, 3, start=5)


@case
def state_dict_needs_consolidation_on_the_asking_rank():
    zero, _, own, _ = _pair(*OPTIMIZERS["adam"])
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
        zero, plain, own, other = _pair(cls, options)
        zero.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.03
        _step_both(zero, plain, own, other, 2)
        zero.consolidate_state_dict()
        if hvd.rank() == 0:
            assert_state_dicts_equal(zero.state_dict(), plain.state_dict())


def _on_every_rank(value):
    return hvd.broadcast_object(value, root_rank=0, name="checkpoint")


@case
def checkpoints_load_both_ways():
    for (cls, options), views in itertools.product(OPTIMIZERS.values(), (False, True)):
        zero, plain, own, other = _pair(cls, options, parameters_as_bucket_view=views)
        zero.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.03
        _step_both(zero, plain, own, other, 3)
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
        _step_both(zero, continued, own, other, 3, start=3)
        assert_state_dicts_equal(whole, given)


@case
def loading_moves_state_to_the_parameters_device_and_type():
    zero, plain, own, other = _pair(*OPTIMIZERS["adam"])
    _step_both(zero, plain, own, other, 1)
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
    zero, *_ = _pair(*OPTIMIZERS["adam"])
    others = torch.optim.Adam(parameters_of_sizes(3, 4))
    raises(ValueError, "belongs to another model", lambda: zero.load_state_dict(others.state_dict()))


@case
def shares_are_cut_out_of_the_whole_state():
    zero, plain, own, other = _pair(*OPTIMIZERS["adamw"])
    _step_both(zero, plain, own, other, 2)
    zero.consolidate_state_dict()
    whole = _on_every_rank(zero.state_dict() if hvd.rank() == 0 else None)
    share = Zero.rank_local_state_dict(hvd.rank(), whole)
    local = zero.local_state_dict()
    assert_state_dicts_equal(share, local)
    zero.optim.load_state_dict(share)
    raises(ValueError, "ranks 0 to", lambda: Zero.rank_local_state_dict(hvd.size(), whole))
    raises(ValueError, "no 'partition'", lambda: Zero.rank_local_state_dict(0, plain.state_dict()))


@case
def bucket_views():
    sizes = (6, 8) if hvd.size() == 2 else (6, 8, 4, 3)
    own = parameters_of_sizes(*sizes)
    zero = Zero(own, torch.optim.SGD, lr=0.1, parameters_as_bucket_view=True)
    buckets = [b for per_owner in zero._views.buckets for b in per_owner]
    assert sorted(b.numel() for b in buckets) == sorted(sizes)
    assert all(any(p.data_ptr() == b.data_ptr() for b in buckets) for p in own)
    # A parameter that somebody re-points is moved back.
    own[0].data = own[0].data.clone()
    other = twin(own)
    set_mean_gradients(own, 0)
    set_mean_gradients(other, 0)
    zero.step()
    torch.optim.SGD(other, lr=0.1).step()
    assert_bits_equal(own, other)
    assert any(own[0].data_ptr() == b.data_ptr() for per_owner in zero._views.buckets for b in per_owner)
    # Frozen ones get memory of their own.
    own[1].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zero.step()
    assert all(own[1].data_ptr() != b.data_ptr() for per_owner in zero._views.buckets for b in per_owner)


@case
def any_dense_type_and_memory_order():
    for dtype, views in itertools.product((torch.float16, torch.bfloat16, torch.float32, torch.float64), (False, True)):
        for density in (1.0, 0.01):
            torch.manual_seed(0)
            own = [nn.Parameter(torch.randn(40, 30).to(dtype)), nn.Parameter(torch.randn(30, 50).t().to(dtype))]
            own += [nn.Parameter(torch.randn(4, 6, 5, 5).to(dtype).to(memory_format=torch.channels_last))]
            own += [nn.Parameter(torch.tensor(0.5, dtype=dtype)), nn.Parameter(torch.empty(0, 3, dtype=dtype))]
            if views:
                # A bucket makes them contiguous, and torch rounds float16 differently along strides.
                for p in own:
                    p.data = p.data.contiguous()
            zero, plain, own, other = _pair(
                torch.optim.SGD, {"lr": 0.1}, parameters=own, parameters_as_bucket_view=views
            )
            _step_both(zero, plain, own, other, 3, density=density)
            sparse = zero.stats.total.bytes_sent < zero.stats.total.dense_bytes / 3
            assert sparse == (density < 1) or zero.stats.total.dense_bytes < 2000, (dtype, density, zero.stats.as_dict())


@case
def few_changes_travel_as_entries_and_many_whole():
    own = parameters_of_sizes(20_000, 300, 20_000, 17)
    zero, plain, own, other = _pair(torch.optim.SGD, {"lr": 0.1}, parameters=own)
    for step in range(12):
        density = 1.0 if step % 4 == 3 else 0.001
        _step_both(zero, plain, own, other, 1, start=step, density=density)
        last = zero.stats.last
        assert last.dense_bytes == 4 * sum(p.numel() for g in zero.optim.param_groups for p in g["params"])
        if density == 1:
            assert last.bytes_sent == last.dense_bytes + 24
        else:
            assert last.bytes_sent < 20_000 * 4 * 0.02, last
    _step_both(zero, plain, own, other, 1, start=99, density=0.0)
    assert zero.stats.last.bytes_sent == 24


@case
def entries_carry_exact_bits():
    """-0.0, NaN and infinities arrive as they are, and an owner with many changes does not hinder the others."""

    class Writes(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.view(-1)[:: 1 if p.numel() == 999 else 501].add_(1.0)
                    p.data.view(-1)[:5] = torch.tensor([-0.0, 0.0, float("nan"), float("inf"), 1e-42])

    own = parameters_of_sizes(1000, 999, 1001, 1002)
    other = twin(own)
    zero = Zero(own, Writes)
    plain = Writes(other)
    for _ in range(3):
        zero.step()
        plain.step()
        assert_bits_equal(own, other)
    assert_replicas_identical(own)


@case
def adam_stops_looking_for_changes():
    """After a few steps Adam moves every entry; then the copy and the comparison are not made at each step."""
    zero, plain, own, other = _pair(torch.optim.Adam, {"lr": 0.01}, parameters=parameters_of_sizes(5000, 5000, 5000, 5000))
    _step_both(zero, plain, own, other, 30, density=0.3)
    assert not zero._sharing._tracker._before
    assert zero._sharing._tracker._skip > 4


@case
def constructor_errors_come_before_any_waiting():
    p = nn.Parameter(torch.zeros(3))
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
        (ValueError, "build one optimizer for each", lambda: Zero([p, nn.Parameter(torch.zeros(2).double())], torch.optim.SGD)),
        (ValueError, "more than one parameter group", lambda: Zero([{"params": [p]}, {"params": [p]}], torch.optim.SGD)),
        (ValueError, "functional", lambda: Zero([p], nn.Linear, lr=0.1)),
        (TypeError, "give a class", lambda: Zero([p], torch.optim.SGD([p]), lr=0.1)),
        (TypeError, "needs optimizer_class", lambda: Zero([p], lr=0.1)),
        (TypeError, "nonsense", lambda: Zero([p], torch.optim.SGD, lr=0.1, nonsense=1)),
        (ValueError, "overlap_with_ddp", lambda: Zero([p], torch.optim.SGD, overlap_with_ddp=True, lr=0.1)),
        (ValueError, "LBFGS", lambda: Zero([p], torch.optim.LBFGS)),
        (TypeError, "ProcessSet", lambda: Zero([p], torch.optim.SGD, group="world", lr=0.1)),
        (ValueError, "mean the same", lambda: Zero(
            [p], torch.optim.SGD, group=hvd.global_process_set, process_set=hvd.global_process_set)),
    ]
    for error, match, build in bad:
        raises(error, match, build)
    Zero((q for q in [p]), torch.optim.SGD, lr=0.1)
    named = Zero(make_model().named_parameters(), torch.optim.SGD, lr=0.1)
    assert named.param_groups[0]["param_names"][0] == "0.weight"
    zero = Zero([p], torch.optim.SGD, lr=0.1)
    raises(TypeError, "must be a dict", lambda: zero.add_param_group([p]))
    raises(ValueError, "build one optimizer for each", lambda: zero.add_param_group({"params": [torch.zeros(2).double()]}))


@case
def ranks_that_disagree_get_the_same_error():
    rank = hvd.rank()
    shapes = (3, 4) if rank else (3, 5)
    error = raises(LayoutError, r"'group 0 parameter 1' is", lambda: Zero(parameters_of_sizes(*shapes), torch.optim.SGD))
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
def unpicklable_state_fails_on_all_ranks():
    own = parameters_of_sizes(4, 5, 6, 7)
    zero = Zero(own, torch.optim.SGD, lr=0.1)
    if hvd.rank() == 0:
        zero.optim.state[next(p for g in zero.optim.param_groups for p in g["params"])]["bad"] = lambda: 0
    try:
        zero.consolidate_state_dict()
    except RemoteError:
        assert hvd.rank() != 0
    except Exception as error:
        assert hvd.rank() == 0, error
    else:
        raise AssertionError("nothing was raised")


@case
def process_sets():
    if hvd.size() < 4:
        raise SkipCase("needs 4 ranks")
    even = hvd.add_process_set([0, 2])
    if hvd.rank() % 2 == 0:
        for views in (False, True):
            zero = Zero(list(make_model().parameters()), torch.optim.Adam, group=even, lr=0.01, parameters_as_bucket_view=views)
            own = [p for g in zero.param_groups for p in g["params"]]
            other = twin(own)
            plain = torch.optim.Adam(other, lr=0.01)
            for step in range(3):
                for optimizer, parameters in ((zero, own), (plain, other)):
                    set_mean_gradients(parameters, step, size=2, density=0.01 if step == 1 else 1.0)
                    optimizer.step()
            assert_bits_equal(own, other)
            zero.consolidate_state_dict(to=1)
            if hvd.rank() == 2:
                assert_state_dicts_equal(zero.state_dict(), plain.state_dict())
    else:
        raises(ConfigError, "not in", lambda: Zero(parameters_of_sizes(3), torch.optim.SGD, process_set=even))
    hvd.barrier()


if __name__ == "__main__":
    hvd.init()
    run_cases()
