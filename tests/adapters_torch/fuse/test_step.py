"""A fused step leaves exactly what a plain step leaves."""

from __future__ import annotations

import pytest
import torch
from adapters_torch.fuse.fuse_tools import (
    ALGORITHMS,
    SHAPES,
    LossScaled,
    Own,
    Twins,
    count_calls,
    fill_grads,
    fused_counts,
    make_params,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dgc.torch.fuse import fuse_optimizer, fuse_step


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_hundred_steps_are_bit_equal_fused_and_plain_in_turn(name, dtype):
    cls, options = ALGORITHMS[name]
    twins = Twins(cls, options, dtype=dtype)
    for step in range(100):
        fuse = step % 3 != 1
        twins.run(fuse=fuse)
        if fuse:
            assert fused_counts(twins.fused) == (1, len(SHAPES))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_equal_to_rounding(name, dtype):
    # torch's CPU kernels round the last elements of a tensor otherwise than the rest, so which elements are "last"
    # shows in the last bit. Few steps: these differences grow like any other.
    cls, options = ALGORITHMS[name]
    twins = Twins(cls, options, dtype=dtype)
    for _ in range(3):
        twins.step()
    assert fused_counts(twins.fused) == (1, len(SHAPES))
    for plain, fused in zip(twins.plain_params, twins.fused_params, strict=True):
        torch.testing.assert_close(fused, plain, rtol=0.02, atol=0.02, equal_nan=True)  # eps=1e-8 is 0 in float16


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_torch_fused_kernels_are_equal_to_rounding(cls):
    # Their scalar tail contracts multiply-adds otherwise than their vector loop does.
    options = {"lr": 0.01, "fused": True} | ({"momentum": 0.9} if cls is torch.optim.SGD else {})
    twins = Twins(cls, options)
    for _ in range(20):
        twins.step()
    assert fused_counts(twins.fused) == (1, len(SHAPES))
    for plain, fused in zip(twins.plain_params, twins.fused_params, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_number_of_kernel_calls_does_not_grow_with_the_number_of_parameters(name):
    cls, options = ALGORITHMS[name]

    def calls(count: int) -> int:
        params = make_params([(5,)] * count)
        optimizer = fuse_optimizer(cls(params, **options))
        for step in range(2):
            fill_grads(params, seed=step, keep=True)
            optimizer.fuse_step()
        return count_calls(optimizer.fuse_step)

    assert calls(40) == calls(4)


def test_gradients_in_place_are_used_without_a_copy():
    twins = Twins(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    twins.step()
    places = [p.grad.data_ptr() for p in twins.fused_params]
    twins.run(3, keep=True)
    assert [p.grad.data_ptr() for p in twins.fused_params] == places


@pytest.mark.parametrize(
    ("cls", "options"), [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.01})]
)
def test_groups_types_and_options_stay_apart(cls, options):
    def grouped(params, **options):
        first, second, third = params[:4], params[4:9], params[9:]
        groups = [{"params": first, "weight_decay": 0.1}, {"params": second, "lr": 0.02}, {"params": third}]
        return cls(groups, **options)

    def params():
        made = make_params([(4,), (3, 2)] * 6)
        for i in (5, 6, 10):
            made[i] = torch.nn.Parameter(made[i].detach().double())
        return made

    # 4 of group 0; 3 float32 and 2 float64 of group 1; 2 float32 of group 2, whose only float64 stays alone
    Twins(grouped, options, make=params).run(20, counts=(4, 11))


def test_learning_rate_schedules_act(recwarn):
    twins = Twins(torch.optim.Adam, {"lr": 0.1})
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
        for optimizer in (twins.plain, twins.fused)
    ]
    for _ in range(19):
        twins.step()
        for schedule in schedules:
            schedule.step()
        twins.assert_equal()
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def test_the_closure_runs_once_and_its_loss_is_returned():
    params = make_params()
    optimizer = fuse_optimizer(torch.optim.SGD(params, lr=0.1))
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in params)
        loss.backward()
        losses.append(loss)
        return loss

    expected = [p.detach() * 0.8 for p in params]
    assert optimizer.fuse_step(closure) is losses[0]
    assert len(losses) == 1
    for param, value in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), value)
    assert optimizer.fuse_step() is None


def test_the_closure_may_differentiate_wherever_it_is_called_from():
    params = make_params()
    optimizer = fuse_optimizer(torch.optim.SGD(params, lr=0.1))

    def closure():
        loss = sum((p**2).sum() for p in params)
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.fuse_step(closure) > 0


def test_a_closure_that_makes_new_gradients_every_time_is_followed():
    twins = Twins(torch.optim.Adam, {"lr": 0.01})

    def closure_of(optimizer, params):
        def closure():
            optimizer.zero_grad(set_to_none=True)
            loss = sum((p**4).sum() for p in params)
            loss.backward()
            return loss.item()

        return closure

    for _ in range(10):
        plain = twins.plain.step(closure_of(twins.plain, twins.plain_params))
        assert fuse_step(twins.fused, closure_of(twins.fused, twins.fused_params)) == plain
        twins.assert_equal()
    assert fused_counts(twins.fused) == (1, len(SHAPES))


def quartic(twins, which, calls=None):
    """A closure over one of the twins that computes new gradients and returns the loss."""
    params = twins.plain_params if which is twins.plain else twins.fused_params

    def closure():
        which.zero_grad()
        loss = sum((p**4).mean() for p in params)
        loss.backward()
        if calls is not None:
            calls.append(loss)
        return loss

    return closure


@pytest.mark.parametrize("elementwise", [True, False])
def test_an_optimizer_that_uses_the_loss_gets_the_closures(elementwise):
    twins = Twins(LossScaled, {"lr": 1e-3}, elementwise=elementwise)
    calls = []
    for _ in range(5):
        expected = twins.plain.step(quartic(twins, twins.plain))
        assert torch.equal(twins.fused.fuse_step(quartic(twins, twins.fused, calls)), expected)
        twins.assert_equal()
    assert len(calls) == 5
    assert fused_counts(twins.fused) == ((1, len(SHAPES)) if elementwise else (0, 0))


def test_a_step_without_a_closure_is_not_given_one():
    twins = Twins(LossScaled, elementwise=True)
    twins.run(2)


def test_hooks_see_the_closure_as_the_plain_step_shows_it():
    twins = Twins(torch.optim.SGD, {"lr": 0.1})
    seen = {}
    for optimizer, step in ((twins.plain, twins.plain.step), (twins.fused, twins.fused.fuse_step)):
        closure = quartic(twins, optimizer)
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.update({opt: args}))
        step(closure)
        assert seen[optimizer][-1] is closure


class Evaluating(torch.optim.Optimizer):
    """Evaluates its closure at other times than torch's optimizers do."""

    def __init__(self, params, times=1, first_move=False):
        super().__init__(params, {"times": times, "first_move": first_move})

    @torch.no_grad()
    def step(self, closure):
        (group,) = self.param_groups
        if group["first_move"]:
            for p in group["params"]:
                p.mul_(0.5)
        for _ in range(group["times"]):
            with torch.enable_grad():
                loss = closure()
        for p in group["params"]:
            p.sub_(p.grad, alpha=0.1)
        return loss


@pytest.mark.parametrize("options", [{"times": 2}, {"first_move": True}])
def test_a_closure_evaluated_at_another_time_is_an_error_with_advice(options):
    twins = Twins(Evaluating, options, elementwise=True)
    with pytest.raises(RuntimeError, match=r"Evaluating calls its closure .* call step\(closure\)"):
        twins.fused.fuse_step(quartic(twins, twins.fused))

    twins = Twins(Evaluating, options, elementwise=True)
    for optimizer in (twins.plain, twins.fused):
        optimizer.step(quartic(twins, optimizer))
    twins.assert_equal()


def test_a_closure_that_a_step_requires_is_required():
    with pytest.raises(TypeError, match="closure"):
        Twins(Evaluating, elementwise=True).step()


def test_step_hooks_run_once_with_the_real_groups():
    params = make_params()
    optimizer = fuse_optimizer(torch.optim.SGD(params, lr=0.1))
    seen = []
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda opt, args, kwargs: seen.append(opt.param_groups[0]["params"]))
    fill_grads(params, seed=0)
    optimizer.fuse_step()
    assert len(seen) == 2
    assert all(a is b for group in seen for a, b in zip(group, params, strict=True))


def test_a_step_that_calls_its_parents_step_shows_hooks_the_real_groups():
    class Child(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    params = make_params()
    optimizer = fuse_optimizer(Child(params, lr=0.1), elementwise=True)
    seen = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append(len(opt.param_groups[0]["params"])))
    fill_grads(params, seed=0)
    optimizer.fuse_step()
    assert seen == [len(params)]
    assert fused_counts(optimizer) == (1, len(params))


def test_hooks_of_all_optimizers_run_once():
    params = make_params()
    optimizer = fuse_optimizer(torch.optim.SGD(params, lr=0.1))
    fill_grads(params, seed=0)
    seen = []
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append("hook"))
    try:
        optimizer.fuse_step()
    finally:
        handle.remove()
    assert seen == ["hook"]


def test_a_pre_hook_may_change_gradients():
    def clip(optimizer, args, kwargs):
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-3)

    twins = Twins(torch.optim.SGD, {"lr": 0.1})
    for optimizer in (twins.plain, twins.fused):
        optimizer.register_step_pre_hook(clip)
    twins.run(3)


def test_a_grad_scaler_and_a_scheduler_may_call_it_as_step(recwarn):
    twins = Twins(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    twins.fused.step = twins.fused.fuse_step
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.9) for opt in (twins.plain, twins.fused)]
    for step in range(6):
        fill_grads(twins.plain_params, twins.fused_params, seed=step)
        if step == 2:
            twins.plain_params[1].grad[0] = twins.fused_params[1].grad[0] = float("inf")
        before = twins.fused_params[0].detach().clone()
        for scaler, optimizer, schedule in zip(scalers, (twins.plain, twins.fused), schedules, strict=True):
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        assert torch.equal(before, twins.fused_params[0]) == (step == 2)
        assert all(torch.equal(a, b) for a, b in zip(twins.plain_params, twins.fused_params, strict=True))
    assert fused_counts(twins.fused) == (1, len(SHAPES))
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def test_an_optimizer_that_counts_in_its_options_and_on_itself():
    class Counting(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr=lr)
            self.total = 0

        def step(self, closure=None):
            self.total += 1
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    twins = Twins(Counting, {"lr": 0.1}, elementwise=True)
    twins.run(5, counts=(1, len(SHAPES)))
    assert (twins.fused.total, twins.fused.param_groups[0]["count"]) == (5, 5)


class OldDecay(Own):
    """Adds its weight decay to the gradient in place."""

    def direction(self, p):
        return p.grad.add_(p, alpha=0.5)


def test_an_optimizer_that_changes_gradients_in_place():
    twins = Twins(OldDecay, elementwise=True)
    for _ in range(3):
        twins.step()
        twins.assert_equal()  # compares gradients too
    assert fused_counts(twins.fused) == (1, len(SHAPES))


def test_gradients_that_are_re_pointed_in_place():
    # Horovod does so with p.grad.set_(average), on whatever tensor p.grad is.
    twins = Twins(OldDecay, elementwise=True)
    twins.step()
    for seed in range(3):
        for params in (twins.plain_params, twins.fused_params):
            random = torch.Generator().manual_seed(seed)
            for p in params:
                p.grad.set_(torch.randn(p.shape, generator=random))
        twins.plain.step()
        twins.fused.fuse_step()
        twins.assert_equal()
    assert fused_counts(twins.fused) == (1, len(SHAPES))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_gradients_are_left_to_the_plain_step(cls):
    twins = Twins(cls, {"lr": 0.1})
    for seed in range(4):
        for params, step in twins.steps:
            fill_grads(params, seed=seed)
            values, shape = torch.ones(2, 5) * seed, params[1].shape
            params[1].grad = torch.sparse_coo_tensor([[0, 2]], values, shape, check_invariants=True)
            step()
        assert all(torch.equal(a, b) for a, b in zip(twins.plain_params, twins.fused_params, strict=True))
        assert twins.fused_params[1].grad.is_sparse
        assert fused_counts(twins.fused)[1] in (5, 6)  # the sparse one, and perhaps a neighbour cut off by it


def test_saved_tensors_still_notice_the_update():
    params = make_params([(4, 4), (4, 4)])
    optimizer = fuse_optimizer(torch.optim.SGD(params, lr=0.1))
    x = torch.ones(1, 4, requires_grad=True)
    y = (x @ params[0] @ params[1]).sum()
    fill_grads(params, seed=0)
    optimizer.fuse_step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("first", [True, False])
def test_a_failing_step_leaves_what_a_failing_plain_step_leaves(when, first):
    class Failing(torch.optim.Adam):
        fail = None

        def step(self, closure=None):
            if self.fail == "before":
                raise ValueError("no step today")
            super().step(closure)
            if self.fail == "after":
                raise ValueError("no step today")

    twins = Twins(Failing, {"lr": 0.1}, elementwise=True)
    if not first:
        twins.step()
    fill_grads(twins.plain_params, twins.fused_params, seed=5)
    for optimizer, step in ((twins.plain, twins.plain.step), (twins.fused, twins.fused.fuse_step)):
        optimizer.fail = when
        with pytest.raises(ValueError, match="no step today"):
            step()
        optimizer.fail = None
    twins.step()
    assert all(torch.equal(a, b) for a, b in zip(twins.plain_params, twins.fused_params, strict=True))
    assert {int(s["step"]) for s in twins.fused.state.values()} == {2 - (when == "before") + (not first)}
    assert len(twins.fused.param_groups[0]["params"]) == len(SHAPES)
    assert fused_counts(twins.fused) == (1, len(SHAPES))
