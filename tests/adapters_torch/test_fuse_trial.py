"""Foreign optimizer classes: what a trial must notice, and what it cannot know and is asked otherwise."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from adapters_torch.fuse_tools import SHAPES, Twins, fill_grads, fused_counts, make_params

from dgc.torch.fuse import fuse_optimizer


class Foreign(torch.optim.Optimizer):
    """SGD whose direction a subclass chooses."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.add_(self.direction(group, i, p), alpha=-group["lr"])

    def direction(self, group, i, p):
        return p.grad


class CentralizedConvolutions(Foreign):
    """As Ranger does with ``gc_conv_only``."""

    def direction(self, group, i, p):
        return p.grad - p.grad.mean(dim=(1, 2, 3), keepdim=True) if p.dim() == 4 else p.grad


class CentralizedVolumes(Foreign):
    def direction(self, group, i, p):
        return p.grad - p.grad.mean() if p.dim() == 5 else p.grad


class OtherwiseWhenLarge(Foreign):
    """As optimizers with 8-bit state do."""

    def direction(self, group, i, p):
        return p.grad / p.grad.norm() if p.numel() >= 4096 else p.grad


class OtherwiseWhenVeryLarge(Foreign):
    def direction(self, group, i, p):
        return p.grad / p.grad.norm() if p.numel() >= 30_000 else p.grad


class OtherwiseWhenAllTogether(Foreign):
    def direction(self, group, i, p):
        return p.grad / p.grad.norm() if p.numel() >= 12_000 else p.grad


class OtherwiseForOneShape(Foreign):
    def direction(self, group, i, p):
        return p.grad * 2 if p.shape == (33, 3) else p.grad


class NormFromTheFifthStep(Foreign):
    def direction(self, group, i, p):
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        return p.grad if state["step"] < 5 else p.grad / p.grad.norm()


class NormAfterWarmUp(Foreign):
    def direction(self, group, i, p):
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        return p.grad if state["step"] <= 50 else p.grad / p.grad.norm()


class CentralizedVolumesAfterWarmUp(Foreign):
    def direction(self, group, i, p):
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        return p.grad - p.grad.mean() if p.dim() > 3 and state["step"] > 10 else p.grad


class ByPlace(Foreign):
    def direction(self, group, i, p):
        return p.grad / (1 + i)


class OwnDictionary(Foreign):
    """Momentum in a dictionary by parameter, made at once."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.momentum = {p: torch.zeros_like(p) for group in self.param_groups for p in group["params"]}

    def direction(self, group, i, p):
        return self.momentum[p].mul_(0.9).add_(p.grad)


class OwnLateDictionary(Foreign):
    """The same, made when needed."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.momentum = {}

    def direction(self, group, i, p):
        return self.momentum.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(p.grad)


class OwnDictionaryByNumber(Foreign):
    """Counts of its own, without a tensor anywhere."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.counts = {}

    def direction(self, group, i, p):
        self.counts[id(p)] = self.counts.get(id(p), 0) + 1
        return p.grad / self.counts[id(p)]


class OwnFlatBuffer(Foreign):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.seen = torch.zeros(sum(p.numel() for g in self.param_groups for p in g["params"]))

    def direction(self, group, i, p):
        return p.grad


class SharedByTheClass(Foreign):
    counts: ClassVar[dict] = {}

    def direction(self, group, i, p):
        self.counts[p] = self.counts.get(p, 0) + 1
        return p.grad / self.counts[p]


LARGE = ((3000,), (3000,), (8,))
VERY_LARGE = ((20_000,), (20_000,), (8,))
FOUND_OUT = [
    (CentralizedConvolutions, ((4, 3, 3, 3), (2, 4, 3, 3), (4,))),
    (CentralizedVolumes, ((2, 3, 2, 3, 2), (7,))),
    (OtherwiseWhenLarge, LARGE),
    (OtherwiseWhenVeryLarge, VERY_LARGE),
    (OtherwiseWhenAllTogether, ((64,),) * 200),
    (OtherwiseForOneShape, SHAPES),
    (NormFromTheFifthStep, SHAPES),
    (NormAfterWarmUp, SHAPES),
    (CentralizedVolumesAfterWarmUp, SHAPES),
    (ByPlace, SHAPES),
    (OwnDictionary, SHAPES),
    (OwnLateDictionary, SHAPES),
    (OwnDictionaryByNumber, SHAPES),
    (OwnFlatBuffer, SHAPES),
    (SharedByTheClass, SHAPES),
]


@pytest.mark.parametrize(("cls", "shapes"), FOUND_OUT, ids=lambda value: getattr(value, "__name__", None))
def test_habits_that_make_parameters_differ_are_noticed(cls, shapes):
    with pytest.warns(UserWarning, match=f"{cls.__name__} does not treat every element"):
        twins = Twins(cls, {}, shapes)
    for step in range(12):
        twins.step(fuse=step % 3 != 1)
        twins.assert_equal()
    assert fused_counts(twins.fused) == (0, 0)


@pytest.mark.parametrize("shapes", [SHAPES, VERY_LARGE, ((300, 400), (2, 3, 4, 5, 6)), ((64,),) * 100])
def test_an_element_wise_class_passes_whatever_its_parameters_shapes(shapes, recwarn):
    twins = Twins(Foreign, {}, shapes)
    for _ in range(3):
        twins.step()
        twins.assert_equal()
    assert fused_counts(twins.fused) == (1, len(shapes))
    assert not recwarn.list


# Attributes of parameters


class Multiplied(Foreign):
    def direction(self, group, i, p):
        return p.grad * getattr(p, "lr_mult", 1.0)


def test_parameters_with_attributes_are_stepped_apart():
    def marked():
        params = make_params()
        params[0].lr_mult = 0.0
        params[3].lr_mult = 3.0
        return params

    twins = Twins(Multiplied, make=marked)
    for _ in range(3):
        twins.step()
        twins.assert_equal()
    assert 0 < fused_counts(twins.fused)[1] <= len(SHAPES) - 2


def test_an_attribute_that_comes_later_counts_from_then_on():
    twins = Twins(Multiplied)
    twins.step()
    assert fused_counts(twins.fused) == (1, len(SHAPES))
    twins.plain_params[2].lr_mult = twins.fused_params[2].lr_mult = 5.0
    for _ in range(2):
        twins.step()
        twins.assert_equal()
    assert 0 < fused_counts(twins.fused)[1] < len(SHAPES)


@pytest.mark.parametrize("cls", [Multiplied, torch.optim.SGD])
def test_attributes_that_no_optimizer_reads_are_in_nobodys_way(cls):
    def prepared():
        params = make_params()
        for p in params:
            p._is_hf_initialized = True
            p._dynamo_static_input_type = "guarded"
            p.register_hook(lambda grad: grad)
            p.register_post_accumulate_grad_hook(lambda p: None)
        return params

    twins = Twins(cls, {"lr": 0.1}, make=prepared)
    twins.step()
    twins.assert_equal()
    assert fused_counts(twins.fused) == (1, len(SHAPES))


def test_torchs_own_classes_read_no_attributes():
    def marked():
        params = make_params()
        params[3].regularizer = "none"
        return params

    twins = Twins(torch.optim.Adam, {"lr": 0.1}, make=marked)
    twins.step()
    twins.assert_equal()
    assert fused_counts(twins.fused) == (1, len(SHAPES))


# Options


class NormBelowAThreshold(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, trust=0.0):
        super().__init__(params, {"lr": lr, "trust": trust})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                length = p.norm() * group["trust"] / p.grad.norm() if group["trust"] else 1.0
                p.sub_(p.grad * group["lr"] * length)


@pytest.mark.parametrize(("options", "key"), [({}, "trust"), ({"trust": 0.5, "lr": 0.0}, "lr")])
def test_an_option_that_is_no_longer_zero_asks_for_another_trial(options, key):
    twins = Twins(NormBelowAThreshold, options)
    twins.step()
    twins.assert_equal()
    assert fused_counts(twins.fused) == (1, len(SHAPES))
    for optimizer in (twins.plain, twins.fused):
        optimizer.param_groups[0][key] = 0.3
    with pytest.warns(UserWarning, match="NormBelowAThreshold"):
        twins.step()
    for _ in range(2):
        twins.step()
        twins.assert_equal()
    assert fused_counts(twins.fused) == (0, 0)
    for optimizer in (twins.plain, twins.fused):
        optimizer.param_groups[0][key] = 0.0
    twins.step()
    twins.assert_equal()
    assert fused_counts(twins.fused) == (1, len(SHAPES))


def test_a_schedule_asks_for_no_trials(monkeypatch):
    twins = Twins(Foreign)
    twins.step()
    monkeypatch.setattr("dgc.torch.fuse.elementwise.passes_trial", lambda *_: pytest.fail("another trial"))
    for lr in (0.2, 0.1, torch.tensor(0.05)):
        for optimizer in (twins.plain, twins.fused):
            optimizer.param_groups[0]["lr"] = float(lr)
        twins.step()
        twins.assert_equal()


def test_a_trial_leaves_the_options_alone():
    class Decaying(Foreign):
        def direction(self, group, i, p):
            if i == 0:
                group["lr"].mul_(0.9)
            return p.grad

    rate = torch.tensor(0.1)
    optimizer = fuse_optimizer(Decaying(make_params(), lr=rate))
    assert rate.item() == pytest.approx(0.1)
    assert optimizer.param_groups[0]["lr"] is rate


# Names


class NoDecayOfBiases(Foreign):
    def direction(self, group, i, p):
        names = group.get("param_names")
        return p.grad if names is None or "bias" in names[i] else p.grad + 0.5 * p


@pytest.mark.parametrize("kind", ["bias", "weight"])
def test_a_class_that_goes_by_names_is_noticed_where_there_are_names(kind):
    twins = Twins(NoDecayOfBiases)
    twins.step()
    twins.assert_equal()
    assert fused_counts(twins.fused) == (1, len(SHAPES))

    plain_params, fused_params = make_params(), make_params()
    plain, fused = (
        NoDecayOfBiases([(f"{i}.{kind}", p) for i, p in enumerate(params)]) for params in (plain_params, fused_params)
    )
    with pytest.warns(UserWarning, match="NoDecayOfBiases"):
        fuse_optimizer(fused)
    for step in range(3):
        fill_grads(plain_params, fused_params, seed=step)
        plain.step()
        fused.fuse_step()
        assert all(torch.equal(a, b) for a, b in zip(plain_params, fused_params, strict=True))
    assert fused_counts(fused) == (0, 0)


def test_named_parameters_of_a_class_without_interest_in_names_are_fused(recwarn):
    params = make_params()
    optimizer = fuse_optimizer(Foreign([(f"{i}.weight", p) for i, p in enumerate(params)]))
    fill_grads(params, seed=0)
    optimizer.fuse_step()
    assert fused_counts(optimizer) == (1, len(SHAPES))
    assert len(optimizer.param_groups[0]["param_names"]) == len(SHAPES)
    assert not recwarn.list


# How state is written


class CountsThroughData(Foreign):
    """Writes its counter in a way that no version counter shows."""

    def direction(self, group, i, p):
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
        state["step"].data.add_(1)
        return p.grad / state["step"].item()


def test_a_counter_written_through_data_is_followed():
    twins = Twins(CountsThroughData)
    for step in range(8):
        twins.step(fuse=step % 3 != 1)
        twins.assert_equal()
    assert fused_counts(twins.fused) == (1, len(SHAPES))


# What a class says of itself


def test_a_class_may_say_that_it_is_element_wise(recwarn):
    class NeedsMore(torch.optim.SGD):
        """Cannot be built from its options, so no trial could show it."""

        _fuse_elementwise = True

        def __init__(self, params, model):
            super().__init__(params, lr=0.1)
            self.model = model

    twins = Twins(NeedsMore, {"model": None})
    for _ in range(3):
        twins.step()
        twins.assert_equal()
    assert fused_counts(twins.fused) == (1, len(SHAPES))
    assert not recwarn.list

    class Child(NeedsMore):
        def step(self, closure=None):
            raise AssertionError("what a parent says of itself holds for no subclass")

    with pytest.warns(UserWarning, match="Child"):
        fuse_optimizer(Child(make_params(), model=None))


def test_a_class_may_say_that_it_is_not():
    class Reluctant(Foreign):
        _fuse_elementwise = False

    class Child(Reluctant):
        pass

    for cls in (Reluctant, Child):
        with pytest.warns(UserWarning, match=cls.__name__):
            twins = Twins(cls)
        twins.step()
        twins.assert_equal()
        assert fused_counts(twins.fused) == (0, 0)


# Groups without parameters


def test_an_empty_group_is_not_judged(recwarn):
    class SignSGD(Foreign):
        def direction(self, group, i, p):
            return p.grad.sign()

    def make():
        # As an optimizer that shards its groups leaves them.
        params = make_params()
        optimizer = SignSGD([{"params": params}, {"params": make_params([(2,)])}])
        optimizer.param_groups[1]["params"] = []
        return params, optimizer

    (plain_params, plain), (fused_params, fused) = make(), make()
    fuse_optimizer(fused)
    for step in range(3):
        if step == 2:
            for params, optimizer in ((plain_params, plain), (fused_params, fused)):
                late = make_params([(4,), (5,)])
                optimizer.param_groups[1]["params"] = late
                params.extend(late)
        fill_grads(plain_params, fused_params, seed=step)
        plain.step()
        fused.fuse_step()
        assert all(torch.equal(a, b) for a, b in zip(plain_params, fused_params, strict=True))
        assert fused_counts(fused) == ((1, len(SHAPES)) if step < 2 else (2, len(SHAPES) + 2))
    assert not recwarn.list
