"""On real ranks: steps that fail and are survived, and ranks that drift apart; afterwards all hold the same bits."""

from __future__ import annotations

import itertools
import warnings

import horovod.torch as hvd
import torch
from adapters_torch.workers.horovod_holds import every_tensor_is_held
from worker_tools import case, run_cases
from zero_tools import (
    assert_bits_equal,
    assert_replicas_identical,
    make_model,
    pair,
    parameters_of_sizes,
    raises,
    set_mean_gradients,
    step_both,
    twin,
)

from dgc.errors import LayoutError, RemoteError
from dgc.torch import horovod
from dgc.torch.zero import ZeroRedundancyOptimizer as Zero
from dgc.torch.zero import ranks


class _Breakable(torch.optim.SGD):
    broken = False

    def step(self, closure=None):
        loss = super().step(closure)
        if self.broken:
            raise KeyError("no more memory")
        return loss


def _sharded(cls=_Breakable, **options):
    own = parameters_of_sizes(3000, 2900, 2800, 2700, 2600)
    return own, Zero(own, cls, lr=0.1, **options)


def _good_step(zero, own, step, update=None):
    set_mean_gradients(own, step, density=0.002)
    (update or zero.step)()
    assert_replicas_identical(own)


def _assert_whole_and_then_entries_travel(zero, own, update=None):
    """The first step after a failure makes the replicas equal, and costs its bytes only once."""
    _good_step(zero, own, 10, update)
    last = zero.stats.last
    assert last.bytes_sent == last.dense_bytes + 36, last
    _good_step(zero, own, 11, update)
    assert zero.stats.last.bytes_sent < 0.1 * zero.stats.last.dense_bytes, zero.stats.last


@case
def after_a_failed_closure_the_next_step_makes_replicas_equal():
    for failing, views in itertools.product((0, hvd.size() - 1), (False, True)):
        own, zero = _sharded(parameters_as_bucket_view=views)
        _good_step(zero, own, 0)

        def closure(own=own, failing=failing):
            if hvd.rank() == failing:
                raise KeyError("no more data")
            set_mean_gradients(own, 1, density=0.002)

        for _ in range(2):
            raises(KeyError if hvd.rank() == failing else RemoteError, "no more data", lambda: zero.step(closure))  # noqa: B023
        _assert_whole_and_then_entries_travel(zero, own)


@case
def after_a_failed_update_the_next_step_makes_replicas_equal():
    """What the failing rank has changed by then counts as well."""
    for failing in (0, hvd.size() - 1):
        own, zero = _sharded()
        _good_step(zero, own, 0)
        zero.optim.broken = hvd.rank() == failing
        set_mean_gradients(own, 1, density=0.002)
        raises(KeyError if hvd.rank() == failing else RemoteError, "no more memory", zero.step)
        zero.optim.broken = False
        _assert_whole_and_then_entries_travel(zero, own)


@case
def a_failed_step_is_remembered_when_the_optimizer_is_wrapped():
    own, zero = _sharded()
    zero.optim.broken = hvd.rank() == 1
    set_mean_gradients(own, 1, density=0.002)
    raises((KeyError, RemoteError), "no more memory", zero.step)
    wrapped = hvd.DistributedOptimizer(zero, named_parameters=[(f"p{i}", p) for i, p in enumerate(own)])
    with wrapped.skip_synchronize():
        _assert_whole_and_then_entries_travel(wrapped, own)


@case
def what_was_frozen_after_a_failed_step_becomes_equal_too():
    for views in (False, True):
        own, zero = _sharded(parameters_as_bucket_view=views)
        _good_step(zero, own, 0)
        zero.optim.broken = hvd.rank() == 0
        set_mean_gradients(own, 1)
        raises((KeyError, RemoteError), "no more memory", zero.step)
        zero.optim.broken = False
        for p in own[1:]:
            p.requires_grad_(False)
            p.grad = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _good_step(zero, own, 2)


@case
def an_interrupt_on_all_ranks_leaves_the_optimizer_usable():
    own, zero = _sharded()
    _good_step(zero, own, 0)

    def closure():
        raise KeyboardInterrupt

    try:
        zero.step(closure)
    except KeyboardInterrupt:
        _assert_whole_and_then_entries_travel(zero, own)
    else:
        raise AssertionError("no interrupt")


@case
def a_parameter_frozen_on_one_rank_and_thawed_again():
    own, zero = _sharded()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own[1].requires_grad_(hvd.rank() != 0)
        set_mean_gradients(own, 0, density=0.002)
        raises(LayoutError, r"'group 0 parameter 1' is .*frozen.* on rank 0", zero.step)
        own[1].requires_grad_(True)
        _assert_whole_and_then_entries_travel(zero, own)


@case
def options_that_drift_apart_are_an_error_everywhere():
    own, zero = _sharded()
    _good_step(zero, own, 0)
    for key, value in (("lr", 0.1), ("weight_decay", 0.0), ("lr", torch.tensor(0.1))):
        zero.param_groups[0][key] = value + 0.001 * hvd.rank()
        set_mean_gradients(own, 1, density=0.002)
        raises(LayoutError, f"'group 0 option {key}' is .* on rank 0.*hvd.allreduce", zero.step)
        zero.param_groups[0][key] = value
        _assert_whole_and_then_entries_travel(zero, own)


@case
def a_scheduler_on_local_losses_is_an_error_everywhere():
    own, zero = _sharded()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(zero, patience=0)
    for step, loss in enumerate((1.0, 1.0 if hvd.rank() else 0.5)):
        _good_step(zero, own, step)
        scheduler.step(loss)
    raises(LayoutError, "'group 0 option lr' is .*ReduceLROnPlateau", zero.step)


@case
def an_added_group_with_other_options_is_an_error_everywhere():
    _, zero = _sharded()
    zero.add_param_group({"params": parameters_of_sizes(5), "lr": 0.1 + hvd.rank()})
    raises(LayoutError, "'group 1 option lr' is", zero.step)


@case
def parameters_put_in_by_hand_are_an_error_everywhere():
    def append(zero):
        zero.param_groups[0]["params"].append(parameters_of_sizes(3)[0])

    def replace(zero):
        zero.param_groups[0]["params"][0] = parameters_of_sizes(3000)[0]

    def add_group(zero):
        zero.param_groups.append({"params": parameters_of_sizes(3), "lr": 0.1})

    for change, where in itertools.product((append, replace, add_group), ("everywhere", "one rank")):
        own, zero = _sharded()
        before = [list(group["params"]) for group in zero.param_groups]
        if where == "everywhere" or hvd.rank() == 1:
            change(zero)
        set_mean_gradients(own, 0)
        raises(LayoutError, "use add_param_group", zero.step)
        raises(LayoutError, "use add_param_group", zero.consolidate_state_dict)
        del zero.param_groups[1:]
        zero.param_groups[0]["params"] = before[0]
        _good_step(zero, own, 1)


class _Repoints(torch.optim.Optimizer):
    """Gives parameters new memory instead of changing theirs."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


@case
def an_update_that_repoints_parameters_is_not_lost():
    for views, density in itertools.product((False, True), (1.0, 0.002)):
        own = parameters_of_sizes(3000, 2900, 2800, 2700)
        zero, plain, own, other = pair(_Repoints, {"lr": 0.1}, own, parameters_as_bucket_view=views)
        for step in range(3):
            step_both(zero, plain, own, other, 1, start=step, density=density)
            assert not views or zero._views.intact()


@case
def an_update_that_changes_shapes_is_an_error_everywhere():
    class Cuts(_Repoints):
        def step(self):
            if hvd.rank() == 0:
                p = self.param_groups[0]["params"][0]
                p.data = p.data[:2].clone()

    _, zero = _sharded(Cuts, parameters_as_bucket_view=True)
    raises(LayoutError, "became one of", zero.step)


@case
def parameters_may_change_their_type_together():
    for views in (False, True):
        model = make_model()
        own = list(model.parameters())
        zero = Zero(own, torch.optim.SGD, lr=0.1, parameters_as_bucket_view=views)
        _good_step(zero, own, 0)
        model.double()
        other = twin(own)
        plain = torch.optim.SGD(other, lr=0.1)
        step_both(zero, plain, own, other, 2, density=0.05)
        assert own[0].dtype is torch.float64
        assert_bits_equal(own, other)
        own[1].data = own[1].data.float()
        own[1].grad = None
        raises(LayoutError, "build one optimizer for each type", zero.step)
        model.double()
        if hvd.rank():
            model.float()
        zero.zero_grad()
        raises(LayoutError, "'group 0 parameter 0' is .*float64.* on rank 0", zero.step)


@case
def what_horovod_holds_of_ours_has_another_reference():
    """Its thread must never be the last one but Python's to let go of a tensor: for that it would need the GIL."""
    with every_tensor_is_held(horovod, ranks, at_least=20):
        for chosen in ("auto", "horovod"):
            own, zero = _sharded(transport=chosen)
            for step, broken in enumerate((False, True, False)):  # after a failed step parameters travel whole
                zero.optim.broken = broken
                set_mean_gradients(own, step)
                raises(KeyError, "no more memory", zero.step) if broken else zero.step()
            zero.consolidate_state_dict(to=0)


if __name__ == "__main__":
    run_cases()
