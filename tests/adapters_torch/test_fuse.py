"""A fused step leaves exactly what a plain step leaves, with few kernel calls."""

import copy
import random
from pathlib import Path

import pytest
import torch
from adapters_torch.workers.tensors import through_file
from rank_jobs import each_case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dgc.errors import ConfigError
from dgc.torch import fuse_optimizer, fuse_step, is_fused_optimizer

KINDS = {"2ranks": {}, "1process": {"n": 1, "launcher": "single"}}
test_distributed = each_case(Path(__file__).parent / "workers" / "fuse_cases.py", KINDS)

ALGORITHMS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd-nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}),
    "sgd-dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "adam-amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 1e-2}),
    "adam-foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01, "t0": 20, "weight_decay": 1e-2}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 1e-3}),
}
SHAPES = ((3,), (7, 5), (1,), (64,), (33, 3), (2, 3, 5, 5), (129,))
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


def make_params(shapes=SHAPES, *, dtype=torch.float32, seed=0) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in shapes]


def fill_grads(*twins: list[Tensor], seed: int, skip=()) -> None:
    """Give the i-th parameter of every list the same gradient in a fresh tensor."""
    draw = torch.Generator().manual_seed(1000 + seed)
    for i, params in enumerate(zip(*twins, strict=True)):
        grad = torch.randn(params[0].shape, generator=draw).to(params[0].dtype)
        for p in params:
            p.grad = None if i in skip else torch.empty_like(p).copy_(grad)


def kernel_calls(function) -> int:
    class Counter(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    with Counter() as counter:
        function()
    return counter.calls


def seen_by_sgd(optimizer, params) -> int:
    """How many parameters the update class is shown in a step."""
    seen = []
    init = torch.optim.SGD._init_group

    def counting(self, group, *args):
        seen.append(len(group["params"]))
        return init(self, group, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "_init_group", counting)
        fill_grads(params, seed=0)
        optimizer.fuse_step()
    return sum(seen)


class Twins:
    """A plain and a fused optimizer on equal parameters."""

    def __init__(self, cls, options=None, *, make=make_params, **fuse_options) -> None:
        self.plain_params, self.fused_params = make(), make()
        self.plain = cls(self.plain_params, **(options or {}))
        self.fused = fuse_optimizer(cls(self.fused_params, **(options or {})), **fuse_options)
        self.both = ((self.plain_params, self.plain), (self.fused_params, self.fused))
        self.count = 0

    def run(self, count=1, *, fuse=True, skip=()) -> None:
        for _ in range(count):
            self.count += 1
            fill_grads(self.plain_params, self.fused_params, seed=self.count, skip=skip)
            self.step(fuse)

    def step(self, fuse=True) -> None:
        self.plain.step()
        self.fused.fuse_step() if fuse else self.fused.step()
        self.assert_equal()

    def assert_equal(self) -> None:
        """Parameters, gradients and state_dict agree bit by bit."""
        for plain, fused in zip(self.plain_params, self.fused_params, strict=True):
            assert torch.equal(plain, fused)
            assert (plain.grad is None) == (fused.grad is None)
            if plain.grad is not None and not plain.grad.is_sparse:
                assert torch.equal(plain.grad, fused.grad)
        assert_same_state(self.plain.state_dict(), self.fused.state_dict())


def assert_same_state(expected: dict, actual: dict) -> None:
    assert expected["param_groups"] == actual["param_groups"]
    torch.testing.assert_close(actual["state"], expected["state"], rtol=0, atol=0, check_stride=True)


# Equality with the plain step


@every_algorithm
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_hundred_steps_are_bit_equal_fused_and_plain_in_turn(name, dtype):
    twins = Twins(*ALGORITHMS[name], make=lambda: make_params(dtype=dtype))
    for step in range(100):
        twins.run(fuse=step % 3 != 1)


@every_algorithm
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_equal_to_rounding(name, dtype):
    # torch's CPU kernels round the last elements of a tensor otherwise than the rest.
    twins = Twins(*ALGORITHMS[name], make=lambda: make_params(dtype=dtype))
    for step in range(3):
        fill_grads(twins.plain_params, twins.fused_params, seed=step)
        twins.plain.step()
        twins.fused.fuse_step()
    # eps=1e-8 is 0 in float16
    torch.testing.assert_close(twins.fused_params, twins.plain_params, rtol=0.02, atol=0.02, equal_nan=True)


@every_algorithm
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_number_of_kernel_calls_does_not_grow_with_the_number_of_parameters(name, set_to_none):
    cls, options = ALGORITHMS[name]

    def calls(count: int) -> int:
        params = make_params([(5,)] * count)
        optimizer = fuse_optimizer(cls(params, **options))
        for step in range(3):
            fill_grads(params, seed=step)
            optimizer.fuse_step()
            optimizer.zero_grad(set_to_none=set_to_none)
            sum(p.sum() for p in params).backward()
        return kernel_calls(optimizer.fuse_step)

    assert calls(40) == calls(4)


@pytest.mark.parametrize("name", ["sgd-nesterov", "adam-amsgrad"])
def test_groups_types_and_options_stay_apart(name):
    cls, options = ALGORITHMS[name]

    def grouped(params, **options):
        first, second, third = params[:4], params[4:9], params[9:]
        groups = [{"params": first, "weight_decay": 0.1}, {"params": second, "lr": 0.02}, {"params": third}]
        return cls(groups, **options)

    def params():
        made = make_params([(4,), (3, 2)] * 6)
        for i in (5, 6, 10):
            made[i] = torch.nn.Parameter(made[i].detach().double())
        return made

    Twins(grouped, options, make=params).run(20)


def test_memory_formats_are_kept():
    def conv_params():
        made = make_params([(8, 3, 3, 3), (8,), (4, 8, 3, 3), (4,), (5, 6)])
        for i in (0, 2):
            made[i] = torch.nn.Parameter(made[i].detach().to(memory_format=torch.channels_last))
        made[4] = torch.nn.Parameter(made[4].detach().t())
        return made

    twins = Twins(*ALGORITHMS["adamw"], make=conv_params)
    twins.run(3)
    for p in (*twins.plain_params, *twins.fused_params):
        p.grad = p.grad.contiguous()
    twins.step()


def test_the_closure_runs_once_with_gradients_enabled_and_its_loss_is_returned():
    twins = Twins(*ALGORITHMS["adamw"])
    losses = []

    def closure_of(optimizer, params):
        def closure():
            optimizer.zero_grad()
            loss = sum((p**4).sum() for p in params)
            loss.backward()
            losses.append(loss)
            return loss

        return closure

    for _ in range(5):
        twins.plain.step(closure_of(twins.plain, twins.plain_params))
        with torch.no_grad():
            assert fuse_step(twins.fused, closure_of(twins.fused, twins.fused_params)) is losses[-1]
        twins.assert_equal()
    assert len(losses) == 10
    assert twins.fused.fuse_step() is None


# Other users of the optimizer


def test_schedules_scalers_and_trainers_call_it_as_step(recwarn):
    twins = Twins(*ALGORITHMS["sgd-nesterov"])
    twins.fused.step = twins.fused.fuse_step
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    schedules = [torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=8) for _, opt in twins.both]
    for step in range(6):
        fill_grads(twins.plain_params, twins.fused_params, seed=step)
        if step == 2:
            twins.plain_params[1].grad[0] = twins.fused_params[1].grad[0] = float("inf")
        before = twins.fused_params[0].detach().clone()
        for scaler, (_, optimizer), schedule in zip(scalers, twins.both, schedules, strict=True):
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        assert torch.equal(before, twins.fused_params[0]) == (step == 2)
        assert all(torch.equal(a, b) for a, b in zip(twins.plain_params, twins.fused_params, strict=True))
    assert not recwarn.list


def test_step_hooks_run_once_with_the_real_groups_and_may_change_gradients():
    twins, seen = Twins(torch.optim.SGD, {"lr": 0.1}), []
    for params, optimizer in twins.both:

        def clip(opt, args, kwargs, params=params):
            seen.append(opt)
            assert all(a is b for a, b in zip(opt.param_groups[0]["params"], params, strict=True))
            torch.nn.utils.clip_grad_norm_(opt.param_groups[0]["params"], 1e-3)

        optimizer.register_step_pre_hook(clip)
        optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append(opt))
    twins.run()
    assert seen == [twins.plain] * 2 + [twins.fused] * 2


def test_saved_tensors_still_notice_the_update():
    params = make_params([(4, 4), (4, 4)])
    optimizer = fuse_optimizer(torch.optim.SGD(params, lr=0.1))
    y = (torch.ones(1, 4, requires_grad=True) @ params[0] @ params[1]).sum()
    fill_grads(params, seed=0)
    optimizer.fuse_step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# Surprises


def test_an_unused_parameter_does_not_keep_the_others_from_being_fused():
    params = make_params([(8,)] * 7)
    params.sort(key=Tensor.data_ptr, reverse=True)
    params[3], params[6] = params[6], params[3]  # where the allocator had put a parameter does not matter
    optimizer = fuse_optimizer(torch.optim.SGD(params, lr=0.1))
    fill_grads(params, seed=0, skip=(3,))
    optimizer.fuse_step()
    assert seen_by_sgd(optimizer, params) == 3


@pytest.mark.parametrize("how", ["clear", "replace", "delete", "write"])
def test_state_that_the_user_resets_or_writes(how):
    twins = Twins(*ALGORITHMS["adamw"])
    twins.run(2)
    for params, optimizer in twins.both:
        if how == "clear":
            optimizer.state.clear()
        elif how == "replace":
            optimizer.state = type(optimizer.state)(dict)
        elif how == "delete":
            del optimizer.state[params[2]]
        else:
            optimizer.state[params[2]]["step"].fill_(7.0)
    twins.run(2)


def test_frozen_parameters_stay_untouched_and_are_updated_once_unfrozen():
    def half_frozen():
        params = make_params()
        for p in params[::2]:
            p.requires_grad_(False)
        return params

    twins = Twins(*ALGORITHMS["sgd-nesterov"], make=half_frozen)
    before = [p.data_ptr() for p in twins.fused_params[::2]]
    twins.run(3, skip=(0, 2, 4, 6))
    assert before == [p.data_ptr() for p in twins.fused_params[::2]]
    for params, _ in twins.both:
        for p in params:
            p.requires_grad_(True)
    twins.run(3)
    assert seen_by_sgd(twins.fused, twins.fused_params) == 2


def test_groups_added_after_fusing_are_updated_and_fused():
    twins = Twins(torch.optim.SGD, {"lr": 0.1})
    twins.run()
    for params, optimizer in twins.both:
        late = make_params([(4,), (5, 3)], seed=9)
        params.extend(late)
        optimizer.add_param_group({"params": late, "lr": 0.05})
    twins.run(3)
    assert seen_by_sgd(twins.fused, twins.fused_params) == 2


def test_differentiable_groups_and_parameters_listed_twice_are_stepped_plainly():
    params = make_params()
    optimizer = fuse_optimizer(torch.optim.SGD(params, lr=0.1))
    assert seen_by_sgd(optimizer, params) == 1
    optimizer.param_groups[0]["differentiable"] = True
    assert seen_by_sgd(optimizer, params) == len(params)
    optimizer.param_groups[0]["differentiable"] = False
    optimizer.param_groups[0]["params"].append(params[0])
    assert seen_by_sgd(optimizer, params) == len(params) + 1


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_sparse_gradients_are_left_to_the_plain_step():
    twins = Twins(torch.optim.Adagrad, {"lr": 0.1})
    for seed in range(3):
        fill_grads(twins.plain_params, twins.fused_params, seed=seed)
        for params, _ in twins.both:
            values = torch.ones(2, 5) * seed
            params[1].grad = torch.sparse_coo_tensor([[0, 2]], values, (7, 5), check_invariants=True)
        twins.step()


def swap(params):
    params[0].grad, params[1].grad = params[1].grad, params[0].grad


def share(params):
    params[0].grad = params[1].grad


def turn(params):
    params[0].grad = params[0].grad.t()


def turn_weights(params):
    # Square: the shape does not tell, only the strides do.
    params[0].data, params[0].grad = params[0].data.t(), params[0].grad.clone()


def point_elsewhere(params):
    params[0].grad.set_(torch.ones(4, 4))  # as Horovod does


@pytest.mark.filterwarnings("ignore:.*no longer where fuse_optimizer put them:UserWarning")
@pytest.mark.parametrize("change", [swap, share, turn, turn_weights, point_elsewhere])
def test_gradients_and_weights_that_are_changed_between_steps_are_followed(change):
    twins = Twins(torch.optim.SGD, {"lr": 0.1}, make=lambda: make_params([(4, 4), (4, 4), (3,)]))
    twins.run()
    for params, _ in twins.both:
        change(params)
    twins.step()
    twins.run(2)


def test_weights_that_left_their_place_are_warned_of_once_and_updated_alone():
    twins = Twins(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    twins.run()
    for params, _ in twins.both:
        params[2].data = params[2].data.clone()
    with pytest.warns(UserWarning, match=r"no longer where fuse_optimizer put them"):
        twins.run()
    twins.run()


@pytest.mark.parametrize("options", [{"check_flatten": False}, {"do_flatten": False}])
def test_no_warning_unless_flatness_is_checked(options, recwarn):
    twins = Twins(torch.optim.SGD, {"lr": 0.1}, **options)
    twins.run()
    twins.fused_params[2].data = twins.fused_params[2].data.clone()
    twins.run()
    assert not recwarn.list


@pytest.mark.parametrize("where", ["adam", "step"])
def test_a_failing_step_leaves_what_a_failing_plain_step_leaves(where):
    class Failing(torch.optim.Adam):
        fail = False

        def step(self, closure=None):
            if self.fail and where == "adam":
                raise ValueError("no step today")
            super().step(closure)
            if self.fail:
                raise ValueError("no step today")

    twins = Twins(Failing, {"lr": 0.1}, elementwise=True)
    for fail in (False, True, False):
        twins.plain.fail = twins.fused.fail = fail
        if not fail:
            twins.run()
            continue
        fill_grads(twins.plain_params, twins.fused_params, seed=99)
        for step in (twins.plain.step, twins.fused.fuse_step):
            with pytest.raises(ValueError, match="no step today"):
                step()
        twins.assert_equal()


# Memory


def test_flattening_moves_data_and_keeps_values_parameters_and_alignment():
    params = make_params([(3,), (16, 4), (5,), (2,), (8, 16), (4,), (1,)])
    before = [(id(p), p.detach().clone(), p.stride()) for p in params]
    optimizer = torch.optim.SGD(params, lr=0.1)
    assert fuse_optimizer(optimizer) is optimizer
    assert len({p.untyped_storage().data_ptr() for p in params}) == 1
    for p, (identity, value, stride) in zip(params, before, strict=True):
        assert (id(p), p.stride(), p.grad) == (identity, stride, None)
        assert torch.equal(p, value)
        assert p.data_ptr() % min(p.nbytes & -p.nbytes, 64) == 0


def test_without_flattening_weights_stay_and_only_neighbours_are_fused():
    params = make_params()
    places = [p.data_ptr() for p in params]
    optimizer = fuse_optimizer(torch.optim.SGD(params, lr=0.1), do_flatten=False)
    assert seen_by_sgd(optimizer, params) == len(params)
    assert [p.data_ptr() for p in params] == places
    buffer = torch.zeros(20)
    views = [torch.nn.Parameter(buffer[a:b]) for a, b in [(4, 6), (6, 9), (9, 12)]]
    optimizer = fuse_optimizer(torch.optim.SGD(views, lr=1.0), do_flatten=False)
    assert seen_by_sgd(optimizer, views) == 1
    assert torch.equal(buffer[4:12], -torch.cat([p.grad for p in views]))
    assert not buffer[:4].any()
    assert not buffer[12:].any()


def odd_params():
    gapped = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))[:, ::2]
    memory, shared = torch.ones(6), torch.ones(5).share_memory_()
    made = [torch.tensor(0.5), gapped, torch.empty(0, 3), memory, memory.view(2, 3), memory[1:3], shared]
    return [*make_params([(3,), (4, 2)]), *map(torch.nn.Parameter, made)]


def test_odd_parameters_are_stepped_alone_and_stay_where_they_are():
    twins = Twins(torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.3}, make=odd_params)
    twins.run(4)
    assert twins.fused_params[5].data_ptr() == twins.fused_params[6].data_ptr()
    assert twins.fused_params[-1].is_shared()
    assert seen_by_sgd(twins.fused, twins.fused_params) == 8


# Checkpoints and copies


@pytest.mark.parametrize("name", ["sgd-nesterov", "adamw", "asgd", "adagrad"])
@pytest.mark.parametrize("transfer", [through_file, copy.deepcopy])
@pytest.mark.parametrize("from_fused", [True, False])
def test_checkpoints_pass_between_plain_and_fused(name, transfer, from_fused):
    twins = Twins(*ALGORITHMS[name])
    twins.run(3)
    saved = transfer((twins.fused if from_fused else twins.plain).state_dict())
    weights = [p.detach().clone() for p in twins.plain_params]
    twins.run()
    resumed = Twins(*ALGORITHMS[name])
    resumed.count = 3
    for params, optimizer in resumed.both:
        for p, w in zip(params, weights, strict=True):
            p.data.copy_(w)
        optimizer.load_state_dict(transfer(saved))
    resumed.run()
    assert all(torch.equal(a, b) for a, b in zip(resumed.fused_params, twins.plain_params, strict=True))
    assert_same_state(twins.plain.state_dict(), resumed.fused.state_dict())


def test_a_copy_is_an_ordinary_optimizer():
    twins = Twins(*ALGORITHMS["adamw"])
    twins.run()
    other = copy.deepcopy(twins.fused)
    assert not is_fused_optimizer(other)
    copied = other.param_groups[0]["params"]
    fill_grads(twins.plain_params, copied, seed=5)
    twins.plain.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(twins.plain_params, copied, strict=True))


# Which optimizers


class Own(torch.optim.Optimizer):
    """The gradient's sign, unless told otherwise: a class that nobody knows."""

    def __init__(self, params, lr=0.1, whole=False):
        super().__init__(params, {"lr": lr, "whole": whole})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.9 + p.grad * 0.1
                p.sub_(state["mean"] / (p.norm() if group["whole"] else state["count"]), alpha=group["lr"])


def test_a_class_that_is_not_known_is_stepped_plainly_unless_declared():
    with pytest.warns(UserWarning, match=r"Own is not known .* elementwise=True"):
        twins = Twins(Own, {"whole": True})
    twins.run(3)
    twins = Twins(Own, elementwise=True)
    for step in range(6):
        twins.run(fuse=step != 3)


def test_what_is_known_not_to_be_elementwise_cannot_be_declared():
    with pytest.raises(ConfigError, match="LBFGS does not update"):
        fuse_optimizer(torch.optim.LBFGS(make_params()), elementwise=True)
    with pytest.warns(UserWarning, match="LBFGS is not known"):
        fuse_optimizer(torch.optim.LBFGS(make_params()))


def test_subclasses_are_fused_if_they_step_as_their_parent():
    class Renamed(torch.optim.SGD):
        pass

    params = make_params()
    assert seen_by_sgd(fuse_optimizer(Renamed(params, lr=0.1)), params) == 1
    with pytest.warns(UserWarning, match="Overriding is not known"):
        fuse_optimizer(type("Overriding", (torch.optim.SGD,), {"step": Own.step})(make_params(), lr=0.1))


def test_misuse():
    optimizer, other = (torch.optim.SGD(make_params(), lr=0.1) for _ in range(2))
    fuse_optimizer(optimizer)
    with pytest.raises(RuntimeError, match="fused already"):
        fuse_optimizer(optimizer)
    assert not is_fused_optimizer(other)
    assert not hasattr(other, "fuse_step")
    with pytest.raises(AssertionError, match="call fuse_optimizer"):
        fuse_step(other)
    with pytest.raises(TypeError, match="not Linear"):
        fuse_optimizer(torch.nn.Linear(2, 2))


# Random lives: whatever happens between steps, both agree bit by bit


@pytest.mark.filterwarnings("ignore:.*no longer where fuse_optimizer put them:UserWarning")
@pytest.mark.parametrize("name", ["sgd", "sgd-nesterov", "adam-amsgrad", "rmsprop", "adagrad", "asgd"])
@pytest.mark.parametrize("seed", range(5))
def test_random_lives(name, seed):
    shapes = [(4,), (3, 4), (1,), (8, 2), (5,), (2, 3, 2, 2), (4, 4), (7,)]
    twins = Twins(*ALGORITHMS[name], make=lambda: make_params(shapes))
    draw = random.Random(seed)
    events = 4 * ["gradients"] + 2 * ["reload"] + ["freeze", "turn", "group", "rate"]
    for step in range(40):
        if step == 30:
            events.append("move")
        event = draw.choice(events) if draw.random() < 0.5 else None
        chosen = [i for i in range(len(shapes)) if draw.random() < 0.3]
        set_to_none, value = draw.choice((None, True, False)), draw.random()
        for params, optimizer in twins.both:
            if set_to_none is not None:
                optimizer.zero_grad(set_to_none=set_to_none)
            used = [p for p in params if p.requires_grad]
            if used:
                sum((p**2).sum() for p in used).backward()
            if event == "gradients":
                fill_grads(params, seed=step, skip=chosen)
            elif event == "reload":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif event == "turn":
                params[6].data, params[6].grad = params[6].data.t(), None
            elif event == "rate":
                optimizer.param_groups[0]["lr"] = 0.05 * value
            elif event == "group" and len(optimizer.param_groups) < 3:
                late = make_params([(3,), (4, 2)], seed=step)
                params.extend(late)
                optimizer.add_param_group({"params": late, "lr": 0.03})
            for i in chosen:
                if event == "freeze":
                    params[i].requires_grad_(value < 0.7)
                elif event == "move":
                    params[i].data = params[i].data.clone()
        twins.step(fuse=value < 0.8)
