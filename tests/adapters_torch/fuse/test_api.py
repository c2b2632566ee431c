"""A fused optimizer over its life: cleared and missing gradients, new groups, checkpoints, copies, misuse."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from adapters_torch.fuse.fuse_tools import SHAPES, Own, Twins, assert_same_state, fill_grads, fused_counts, make_params

from dgc.torch.fuse import fuse_optimizer, fuse_step, is_fused_optimizer

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01, "t0": 2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
ALL = (1, len(SHAPES))


def twins_of(name, **options) -> Twins:
    return Twins(*OPTIMIZERS[name], **options)


# Gradients


@every_optimizer
@pytest.mark.parametrize("set_to_none", [True, False])
def test_cleared_gradients_go_on_fusing(name, set_to_none):
    twins = twins_of(name)
    for _ in range(5):
        twins.plain.zero_grad(set_to_none=set_to_none)
        twins.fused.zero_grad(set_to_none=set_to_none)
        for params in (twins.plain_params, twins.fused_params):
            sum((p * p * 0.5 + p).sum() for p in params).backward()
        twins.plain.step()
        twins.fused.fuse_step()
        twins.assert_equal()
        assert fused_counts(twins.fused) == ALL


@every_optimizer
def test_gradients_accumulate_over_several_backward_passes(name):
    twins = twins_of(name)
    for step in range(6):
        for params in (twins.plain_params, twins.fused_params):
            sum((p * p).sum() for p in params).backward()
        if step % 2:
            twins.plain.step()
            twins.fused.fuse_step()
            twins.assert_equal()


@every_optimizer
def test_parameters_without_gradient_are_not_updated(name):
    twins = twins_of(name)
    for step, skip in enumerate([(), (2,), (2,), (0, 5), (), tuple(range(len(SHAPES))), (), (1, 3, 5), ()]):
        before = [p.detach().clone() for p in twins.fused_params]
        twins.run(skip=skip, fuse=step != 2)
        for i in skip:
            assert torch.equal(twins.fused_params[i], before[i])


@every_optimizer
def test_no_gradient_at_the_first_step_then_all(name):
    twins = twins_of(name)
    twins.run(skip=(0, 2, 3))
    twins.run()


@pytest.mark.parametrize("skip", [(3, 4, 5), (3,), (1, 2, 3, 4, 5)])
def test_neighbours_that_get_momentum_late_join_the_others(skip):
    # Depending on who skips, a set and a set, or a set and a single one, become alike by the step itself.
    twins = Twins(*OPTIMIZERS["sgd"], shapes=[(8,)] * 6)
    twins.step(skip=skip)
    twins.run(2, counts=(1, 6))


def test_a_parameter_with_another_step_count_is_not_fused_with_the_others():
    twins = twins_of("adam")
    twins.step(skip=(3,))
    twins.run(5)
    assert 0 < fused_counts(twins.fused)[1] < len(SHAPES)


@pytest.mark.parametrize("value", [7.0, float("nan")])
@pytest.mark.parametrize("through_data", [False, True])
def test_scalar_state_written_by_the_user_splits_the_set(value, through_data):
    twins = twins_of("adam")
    twins.run(2)
    for params, optimizer in twins.both:
        count = optimizer.state[params[2]]["step"]
        (count.data if through_data else count).fill_(value)
    twins.step()
    for plain, fused in zip(twins.plain_params, twins.fused_params, strict=True):
        assert torch.equal(plain, fused) or value != value
    assert fused_counts(twins.fused)[1] in (5, 6)
    assert twins.fused.state[twins.fused_params[0]]["step"] == 3


def test_python_numbers_as_state():
    class Counting(Own):
        def direction(self, p):
            self.state[p]["count"] = self.state[p].get("count", 0) + 1
            return p.grad / self.state[p]["count"]

    twins = Twins(Counting, elementwise=True)
    for skip in [(), (), (3,), ()]:
        twins.run(skip=skip)
    assert 0 < fused_counts(twins.fused)[1] < len(SHAPES)


def test_a_python_nan_as_state():
    class Lost(torch.optim.Optimizer):
        """Keeps a number that is none, the same object for all parameters."""

        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["size"] = float("nan")
                    p.data.sub_(p.grad)

    twins = Twins(Lost, elementwise=True)
    for _ in range(3):
        twins.step()
        assert all(torch.equal(a, b) for a, b in zip(twins.plain_params, twins.fused_params, strict=True))
    assert fused_counts(twins.fused) == (1, len(SHAPES))


def test_state_that_is_replaced_or_dropped_by_the_optimizer():
    class Renewing(Own):
        def direction(self, p):
            state = self.state[p]
            if state.pop("odd", None) is None:
                state["odd"] = p * 0.5
            state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.9 + p.grad * 0.1
            return state["mean"]

    twins = Twins(Renewing, elementwise=True)
    for step in range(6):
        twins.run(fuse=step != 3)
    assert fused_counts(twins.fused) == ALL


@pytest.mark.parametrize("had_state", [False, True])
def test_state_that_a_plain_step_adds_later(had_state):
    class TwoMeans(torch.optim.Optimizer):
        def __init__(self, params, keys=()):
            super().__init__(params, {"lr": 0.1, "keys": keys})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    for key in group["keys"]:
                        mean = self.state[p].setdefault(key, torch.zeros_like(p))
                        mean.lerp_(p.grad, 0.5)
                        p.sub_(mean, alpha=group["lr"])

    twins = Twins(TwoMeans, {"keys": ("first",) if had_state else ()}, elementwise=True)
    twins.step()
    for optimizer in (twins.plain, twins.fused):
        optimizer.param_groups[0]["keys"] = ("first", "second")
    twins.step(fuse=False)
    twins.run(2, counts=ALL)


# Parameters


def test_frozen_parameters_stay_untouched_and_outside():
    def half_frozen():
        params = make_params()
        for p in params[::2]:
            p.requires_grad_(False)
        return params

    twins = Twins(*OPTIMIZERS["sgd"], make=half_frozen)
    flat = {p.untyped_storage().data_ptr() for p in twins.fused_params[1::2]}
    assert len(flat) == 1
    assert not flat & {p.untyped_storage().data_ptr() for p in twins.fused_params[::2]}
    before = [p.detach().clone() for p in twins.fused_params[::2]]
    twins.run(3, skip=(0, 2, 4, 6), counts=(1, 3))
    assert all(torch.equal(a, b) for a, b in zip(before, twins.fused_params[::2], strict=True))
    assert all(p.grad is None for p in twins.fused_params[::2])


def test_unfrozen_parameters_are_fused_from_then_on():
    def last_frozen():
        params = make_params()
        for p in params[4:]:
            p.requires_grad_(False)
        return params

    twins = Twins(*OPTIMIZERS["adam"], make=last_frozen)
    twins.step(skip=(4, 5, 6))
    for params in (twins.plain_params, twins.fused_params):
        for p in params[4:]:
            p.requires_grad_(True)
    twins.run(3, counts=(2, 7))


@every_optimizer
def test_groups_added_after_fusing_are_updated_and_fused(name):
    twins = twins_of(name)
    twins.step()
    for params, optimizer in twins.both:
        late = make_params([(4,), (5, 3)], seed=9)
        params.extend(late)
        optimizer.add_param_group({"params": late, "lr": 0.05})
    twins.run(3, counts=(2, len(SHAPES) + 2))


def test_parameters_added_to_a_group_and_removed_from_it():
    twins = twins_of("sgd")
    twins.step()
    for params, optimizer in twins.both:
        late = make_params([(4,), (5, 3)], seed=9)
        params.extend(late)
        optimizer.param_groups[0]["params"].extend(late)
    twins.run()
    assert fused_counts(twins.fused)[1] == len(SHAPES) + 2
    for params, optimizer in twins.both:
        dropped = params.pop(1)
        group = optimizer.param_groups[0]
        group["params"] = [p for p in group["params"] if p is not dropped]
        optimizer.state.pop(dropped)
    twins.run()


@pytest.mark.parametrize("reset", ["clear", "replace", "delete"])
def test_state_reset_by_the_user(reset):
    twins = twins_of("adam")
    twins.step()
    for params, optimizer in twins.both:
        if reset == "clear":
            optimizer.state.clear()
        elif reset == "replace":
            optimizer.state = type(optimizer.state)(dict)
        else:
            del optimizer.state[params[2]]
    twins.run(2)


def test_differentiable_groups_are_stepped_plainly():
    params = make_params()
    optimizer = fuse_optimizer(torch.optim.SGD(params, lr=0.1, differentiable=False))
    for differentiable in (True, False, True):
        optimizer.param_groups[0]["differentiable"] = differentiable
        fill_grads(params, seed=0)
        optimizer.fuse_step()
        assert fused_counts(optimizer) == ((0, 0) if differentiable else ALL)


# Checkpoints


def through_file(value, weights_only=True):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def cloned(state_dict):
    """As if every tensor had been read from a file of its own."""
    state = {
        key: {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in entries.items()}
        for key, entries in state_dict["state"].items()
    }
    return {"state": state, "param_groups": copy.deepcopy(state_dict["param_groups"])}


@every_optimizer
@pytest.mark.parametrize("transfer", [through_file, cloned, copy.deepcopy])
@pytest.mark.parametrize("from_fused", [True, False])
def test_checkpoints_pass_between_plain_and_fused_and_fuse_again(name, transfer, from_fused):
    twins = twins_of(name)
    for _ in range(3):
        twins.step()
    source = twins.fused if from_fused else twins.plain
    saved = transfer(source.state_dict())
    weights = [p.detach().clone() for p in twins.plain_params]
    twins.step()

    resumed = twins_of(name)
    resumed.count = 3
    for params, optimizer in resumed.both:
        for p, w in zip(params, weights, strict=True):
            p.data.copy_(w)
        optimizer.load_state_dict(transfer(saved))
    resumed.step()
    resumed.assert_equal()
    assert fused_counts(resumed.fused) == ALL
    assert all(torch.equal(a, b) for a, b in zip(resumed.fused_params, twins.plain_params, strict=True))
    assert_same_state(twins.plain.state_dict(), resumed.fused.state_dict())


@every_optimizer
def test_a_running_fused_optimizer_loads_a_checkpoint_and_fuses_again(name):
    twins = twins_of(name)
    for _ in range(2):
        twins.step()
    saved = cloned(twins.plain.state_dict())
    twins.step()
    twins.plain.load_state_dict(cloned(saved))
    twins.fused.load_state_dict(cloned(saved))
    for _ in range(2):
        twins.run(counts=ALL)


def test_loading_does_not_write_into_the_loaded_dictionary():
    twins = twins_of("adam")
    twins.step()
    saved = cloned(twins.plain.state_dict())
    expected = cloned(saved)
    resumed = twins_of("adam")
    resumed.fused.load_state_dict(copy.deepcopy(saved))
    resumed.step()
    assert_same_state(expected, saved)


def test_a_model_checkpoint_is_loaded_in_place_and_stays_fused():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
    saved = copy.deepcopy(model.state_dict())
    optimizer = fuse_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.fuse_step()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), saved.values(), strict=True)) is False
    model.load_state_dict(saved)
    optimizer.fuse_step()
    assert fused_counts(optimizer) == (1, 4)


# Copies


@pytest.mark.parametrize("duplicate", [copy.deepcopy, partial(through_file, weights_only=False)], ids=["deep", "file"])
def test_a_copy_is_fused_and_independent(duplicate):
    twins = twins_of("adam")
    twins.step()
    other = duplicate(twins.fused)
    assert type(other) is torch.optim.Adam
    assert is_fused_optimizer(other)
    assert other._dgc_fuse is not twins.fused._dgc_fuse
    before = [p.detach().clone() for p in twins.fused_params]

    copied = other.param_groups[0]["params"]
    fill_grads(twins.plain_params, copied, seed=5)
    twins.plain.step()
    other.fuse_step()
    assert fused_counts(other) == ALL
    assert all(torch.equal(a, b) for a, b in zip(twins.plain_params, copied, strict=True))
    assert_same_state(twins.plain.state_dict(), other.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(before, twins.fused_params, strict=True))


def test_a_copy_keeps_the_arguments():
    optimizer = fuse_optimizer(torch.optim.SGD(make_params(), lr=0.1), do_flatten=False)
    other = copy.deepcopy(optimizer)
    places = [p.data_ptr() for p in other.param_groups[0]["params"]]
    fill_grads(other.param_groups[0]["params"], seed=0)
    other.fuse_step()
    assert [p.data_ptr() for p in other.param_groups[0]["params"]] == places
    assert fused_counts(other) == (0, 0)


def test_model_and_optimizer_copied_together_belong_together():
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
    optimizer = fuse_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    other_model, other = copy.deepcopy((model, optimizer))
    assert all(a is b for a, b in zip(other_model.parameters(), other.param_groups[0]["params"], strict=True))
    other_model(torch.ones(2, 5)).sum().backward()
    before = [p.detach().clone() for p in other_model.parameters()]
    other.fuse_step()
    assert not any(torch.equal(a, b) for a, b in zip(before, other_model.parameters(), strict=True))


def test_a_shallow_copy_shares_parameters_and_state():
    twins = twins_of("adam")
    twins.step()
    shallow = copy.copy(twins.fused)
    assert is_fused_optimizer(shallow)
    fill_grads(twins.plain_params, twins.fused_params, seed=7)
    twins.plain.step()
    shallow.fuse_step()
    twins.assert_equal()
    assert fused_counts(shallow) == ALL
    twins.run(counts=ALL)


def test_a_pickled_copy_has_weights_of_its_own():
    # pickle writes every parameter with a storage of its own: results stay right, whether they can be fused or not.
    twins = twins_of("adam")
    twins.step()
    other = pickle.loads(pickle.dumps(twins.fused))
    assert is_fused_optimizer(other)
    copied = other.param_groups[0]["params"]
    fill_grads(twins.plain_params, copied, seed=5)
    twins.plain.step()
    other.fuse_step()
    assert all(torch.equal(a, b) for a, b in zip(twins.plain_params, copied, strict=True))


# Misuse


def test_only_the_instance_is_changed():
    before = dict(vars(torch.optim.SGD))
    first, second = (torch.optim.SGD(make_params(), lr=0.1) for _ in range(2))
    fuse_optimizer(first)
    assert is_fused_optimizer(first)
    assert not is_fused_optimizer(second)
    assert not hasattr(second, "fuse_step")
    assert not hasattr(torch.optim.SGD, "fuse_step")
    assert dict(vars(torch.optim.SGD)) == before
    assert type(first) is torch.optim.SGD


def test_fusing_twice_is_an_error():
    optimizer = fuse_optimizer(torch.optim.SGD(make_params(), lr=0.1))
    with pytest.raises(RuntimeError, match="fused already"):
        fuse_optimizer(optimizer)


def test_fuse_step_of_an_unfused_optimizer_is_an_error():
    with pytest.raises(AssertionError, match="call fuse_optimizer"):
        fuse_step(torch.optim.SGD(make_params(), lr=0.1))


def test_only_optimizers_can_be_fused():
    with pytest.raises(TypeError, match="not Linear"):
        fuse_optimizer(torch.nn.Linear(2, 2))
