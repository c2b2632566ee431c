"""On real ranks: the sharded optimizer against the unsharded one, bit for bit."""

from __future__ import annotations

import itertools
import warnings

import horovod.torch as hvd
import torch
from torch import nn
from worker_tools import case, run_cases
from zero_tools import (
    OPTIMIZERS,
    assert_bits_equal,
    assert_replicas_identical,
    assert_state_dicts_equal,
    make_model,
    pair,
    parameters_of_sizes,
    raises,
    set_mean_gradients,
    step_both,
    twin,
)

from dgc.errors import ConfigError
from dgc.torch.zero import ZeroRedundancyOptimizer as Zero


@case
def same_bits_as_unsharded():
    for (cls, options), views, maximize in itertools.product(OPTIMIZERS.values(), (False, True), (False, True)):
        step_both(*pair(cls, {**options, "maximize": maximize}, parameters_as_bucket_view=views), 6)


@case
def same_bits_when_trainability_changes():
    for (cls, options), views in itertools.product(OPTIMIZERS.values(), (False, True)):
        zero, plain, own, other = pair(cls, options, parameters_as_bucket_view=views)
        step_both(zero, plain, own, other, 2)
        for number, trainable, steps in ((1, False, 2), (4, False, 2), (1, True, 3)):
            own[number].requires_grad_(trainable)
            other[number].requires_grad_(trainable)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step_both(zero, plain, own, other, steps, start=10 * number + trainable)
            assert ["frozen or unfrozen" in str(w.message) for w in caught] == [True]


@case
def a_frozen_parameter_with_an_old_gradient_is_updated_everywhere():
    """torch's optimizers go by the gradient, not by requires_grad."""
    for views in (False, True):
        zero, plain, own, other = pair(*OPTIMIZERS["adam"], parameters_as_bucket_view=views)
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
    zero, plain, own, other = pair(*OPTIMIZERS["adamw"])
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
    zero, *_, own, _ = pair(*OPTIMIZERS["adam"])
    set_mean_gradients(own, 0)
    zero.step()
    mine = [p for g in zero.partition_parameters()[hvd.rank()] for p in g["params"]]
    assert set(map(id, zero.optim.state)) == set(map(id, mine))
    assert not zero.state
    assert set(zero.local_state_dict()["state"]) == set(range(len(mine)))


@case
def fewer_parameters_than_ranks():
    for kind, views in itertools.product(OPTIMIZERS.values(), (False, True)):
        zero, plain, own, other = pair(*kind, parameters=parameters_of_sizes(5), parameters_as_bucket_view=views)
        step_both(zero, plain, own, other, 3)
        zero.consolidate_state_dict(to=hvd.size() - 1)
        if hvd.rank() == hvd.size() - 1:
            assert list(zero.state_dict()["state"]) == [0]


@case
def closure_is_evaluated_once_and_its_loss_returned():
    for views in (False, True):
        zero, plain, own, other = pair(*OPTIMIZERS["sgd"], parameters_as_bucket_view=views)
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
    zero, _, own, _ = pair(*OPTIMIZERS["sgd"])
    set_mean_gradients(own, 0)
    zero.zero_grad()
    assert all(p.grad is None for p in own)


@case
def options_flow_both_ways():
    zero, _, own, _ = pair(*OPTIMIZERS["adam"])
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
        zero, plain, own, other = pair(cls, options)
        both = make(zero), make(plain)
        for step in range(8):
            step_both(zero, plain, own, other, 1, start=step)
            for scheduler in both:
                scheduler.step()
            assert zero.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


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
            zero, plain, own, other = pair(
                torch.optim.SGD, {"lr": 0.1}, parameters=own, parameters_as_bucket_view=views
            )
            step_both(zero, plain, own, other, 3, density=density)
            total = zero.stats.total
            sparse = total.bytes_sent < total.dense_bytes / 3
            assert sparse == (density < 1) or total.dense_bytes < 2000, (dtype, density, total)


@case
def few_changes_travel_as_entries_and_many_whole():
    own = parameters_of_sizes(20_000, 300, 20_000, 17)
    zero, plain, own, other = pair(torch.optim.SGD, {"lr": 0.1}, parameters=own)
    for step in range(12):
        density = 1.0 if step % 4 == 3 else 0.001
        step_both(zero, plain, own, other, 1, start=step, density=density)
        last = zero.stats.last
        assert last.dense_bytes == 4 * sum(p.numel() for g in zero.optim.param_groups for p in g["params"])
        if density == 1:
            assert last.bytes_sent == last.dense_bytes + 36
        else:
            assert last.bytes_sent < 20_000 * 4 * 0.02, last
    step_both(zero, plain, own, other, 1, start=99, density=0.0)
    assert zero.stats.last.bytes_sent == 36


@case
def entries_carry_exact_bits():
    """-0.0, NaN and infinities arrive as they are, and an owner with many changes does not hinder the others."""

    class Writes(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})
            self.sign = 1.0

        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.view(-1)[:: 1 if p.numel() == 2999 else 501].add_(1.0)
                    p.data.view(-1)[:5] = self.sign * torch.tensor([-0.0, 0.0, float("nan"), float("inf"), 1e-42])
            self.sign = -self.sign

    own = parameters_of_sizes(3000, 2999, 3001, 3002)
    other = twin(own)
    zero = Zero(own, Writes)
    plain = Writes(other)
    mine = [p for g in zero.optim.param_groups for p in g["params"]]
    dense = any(p.numel() == 2999 for p in mine)
    for step in range(3):
        zero.step()
        plain.step()
        assert_bits_equal(own, other)
        # Multiples of 501 and the first five (of which the first is in both; a 0.0 or a NaN need not change again).
        few = 11 * len(mine)
        last = zero.stats.last
        if dense:
            assert last.bytes_sent > 4 * 2999, last
        else:
            assert 6 * len(mine) <= last.entries_sent <= few, (step, last)
            assert last.bytes_sent < 36 + 16 * few, last
    assert_replicas_identical(own)


@case
def adam_stops_looking_for_changes():
    """After a few steps Adam moves every entry; then the copy and the comparison are not made at each step."""
    zero, plain, own, other = pair(
        torch.optim.Adam, {"lr": 0.01}, parameters=parameters_of_sizes(5000, 5000, 5000, 5000)
    )
    step_both(zero, plain, own, other, 30, density=0.3)
    assert not zero._sharing._tracker._before
    assert zero._sharing._tracker._skip > 4


@case("4ranks")
def process_sets():
    even = hvd.add_process_set([0, 2])
    if hvd.rank() % 2 == 0:
        for views in (False, True):
            zero = Zero(
                list(make_model().parameters()), torch.optim.Adam, group=even, lr=0.01, parameters_as_bucket_view=views
            )
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
    run_cases()
