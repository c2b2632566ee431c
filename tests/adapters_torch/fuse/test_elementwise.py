"""Which optimizers are fused: torch's element-wise ones and declared ones; all others step as they would alone."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from adapters_torch.fuse.fuse_tools import (
    ALGORITHMS,
    SHAPES,
    LossScaled,
    Own,
    Twins,
    fill_grads,
    fused_counts,
    make_params,
)

from dgc.errors import ConfigError
from dgc.torch.fuse import fuse_optimizer, is_fused_optimizer
from dgc.torch.fuse.elementwise import is_elementwise

MATRICES = ((4, 3), (5, 5), (2, 7))
ALL = (1, len(SHAPES))


class Momentum(Own):
    """Element-wise, with state of its own making."""

    def direction(self, p):
        return self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)


class ParameterNorm(Own):
    """The length of a step depends on the norms of the whole parameter, as in LARS and LAMB."""

    def direction(self, p):
        return p.grad * p.norm() / p.grad.norm()


class Polyak(Own):
    """The loss over the norm of all gradients is the step size, as in AliG."""

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        (group,) = self.param_groups
        size = float(loss) / sum(p.grad.square().sum() for p in group["params"])
        for p in group["params"]:
            p.sub_(size * p.grad)
        return loss


UNKNOWN = [ParameterNorm, Momentum]
NEVER = [(torch.optim.Adafactor, SHAPES), (torch.optim.Muon, MATRICES)]


# torch's own


def test_every_fused_class_of_torch_is_tested_for_equal_bits():
    classes = {c for c in vars(torch.optim).values() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    assert {cls for cls in classes if is_elementwise(cls)} == {cls for cls, _ in ALGORITHMS.values()}


@pytest.mark.parametrize(("cls", "shapes"), NEVER)
def test_those_of_torch_that_look_at_whole_parameters_step_plainly(cls, shapes):
    with pytest.warns(UserWarning, match=rf"{cls.__name__} does not update every element .* what step\(\) does\.$"):
        twins = Twins(cls, {}, shapes)
    twins.fused.step = twins.fused.fuse_step
    twins.run(3, counts=(0, 0))


def test_lbfgs_gets_its_closure_as_often_as_it_likes():
    def run(fuse):
        params = make_params([(3,), (4,)])
        optimizer = torch.optim.LBFGS(params, lr=0.5, max_iter=5)
        if fuse:
            with pytest.warns(UserWarning, match="LBFGS"):
                fuse_optimizer(optimizer)
        calls = []

        def closure():
            optimizer.zero_grad()
            loss = sum((p**4).sum() for p in params)
            loss.backward()
            calls.append(loss.item())
            return loss

        loss = optimizer.fuse_step(closure) if fuse else optimizer.step(closure)
        return loss.item(), calls, [p.tolist() for p in params]

    assert run(True) == run(False)
    assert len(run(True)[1]) > 1


@pytest.mark.parametrize("first", ["parent", "child"])
def test_a_subclass_that_keeps_the_step_is_fused(first, recwarn):
    class Parent(torch.optim.SGD):
        pass

    class Child(Parent):
        def __init__(self, params, model):
            super().__init__(params, lr=0.1, momentum=0.9)
            self.model = model

    if first == "parent":  # torch wraps step on the first class of a family that is built
        Parent(make_params(), lr=0.1)
    twins = Twins(Child, {"model": None})
    twins.run(3, counts=ALL)
    assert not recwarn.list


@pytest.mark.parametrize("method", ["step", "_init_group"])
def test_a_subclass_that_overrides_the_step_is_unknown(method):
    def override(self, *args):
        return getattr(torch.optim.Adam, method)(self, *args)

    child = type("Child", (torch.optim.Adam,), {method: override})
    with pytest.warns(UserWarning, match="Child is not known"):
        twins = Twins(child)
    twins.run(counts=(0, 0))


def test_attributes_of_parameters_and_their_names_do_not_matter_to_torchs_classes(recwarn):
    def marked():
        params = make_params()
        params[3].regularizer = "none"
        params[4].register_hook(lambda grad: grad)
        return params

    twins = Twins(torch.optim.Adam, make=marked)
    twins.run(counts=ALL)

    params = make_params()
    optimizer = fuse_optimizer(torch.optim.SGD([(f"{i}.weight", p) for i, p in enumerate(params)], lr=0.1))
    fill_grads(params, seed=0)
    optimizer.fuse_step()
    assert fused_counts(optimizer) == ALL
    assert len(optimizer.param_groups[0]["param_names"]) == len(SHAPES)
    assert not recwarn.list


# Any other


@pytest.mark.parametrize("cls", UNKNOWN)
def test_an_unknown_optimizer_steps_plainly_after_one_warning(cls):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        twins = Twins(cls)
        for step in range(12):
            twins.run(fuse=step % 3 != 1, counts=(0, 0))
    (message,) = [str(w.message) for w in caught]
    assert message.startswith(f"{cls.__name__} is not known to update every element")
    assert "fuse_optimizer(optimizer, elementwise=True)" in message


@pytest.mark.filterwarnings("ignore:Polyak is not known to update every element:UserWarning")
def test_an_unknown_optimizer_gets_the_users_closure():
    twins = Twins(Polyak)
    for _ in range(4):
        losses = []
        for params, step in twins.steps:

            def closure(params=params):
                for p in params:
                    p.grad = None
                loss = sum((p**2).sum() for p in params)
                loss.backward()
                return loss

            losses.append(step(closure).item())
        assert losses[0] == losses[1]
        twins.assert_equal()
    assert losses[0] < 0.5 * sum((p**2).sum() for p in make_params()).item()


@pytest.mark.parametrize("elementwise", [None, False])
@pytest.mark.filterwarnings("ignore:.*is not known to update every element:UserWarning")
def test_parameters_of_an_optimizer_that_is_not_fused_are_not_moved(elementwise):
    params = make_params()
    places = [p.data_ptr() for p in params]
    optimizer = fuse_optimizer(ParameterNorm(params), elementwise=elementwise)
    fill_grads(params, seed=0)
    optimizer.fuse_step()
    assert [p.data_ptr() for p in params] == places


def test_the_warning_points_at_the_users_line():
    with pytest.warns(UserWarning, match="Momentum") as caught:
        fuse_optimizer(Momentum(make_params()))
    assert caught[0].filename == __file__


# Declarations


@pytest.mark.parametrize("shapes", [SHAPES, ((300, 400), (2, 3, 4, 5, 6)), ((64,),) * 100])
@pytest.mark.parametrize("cls", [Own, Momentum, LossScaled])
def test_a_declared_class_is_fused(cls, shapes, recwarn):
    twins = Twins(cls, {}, shapes, elementwise=True)
    for step in range(5):
        twins.run(fuse=step != 2)
    assert fused_counts(twins.fused) == (1, len(shapes))
    assert not recwarn.list


@pytest.mark.parametrize("cls", [Momentum, torch.optim.SGD, torch.optim.Adafactor])
def test_declared_false_steps_plainly_without_a_warning(cls, recwarn):
    twins = Twins(cls, elementwise=False)
    twins.run(2, counts=(0, 0))
    assert not recwarn.list


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon", "SparseAdam"])
def test_what_is_known_to_look_at_whole_parameters_cannot_be_declared(name):
    params = make_params(MATRICES)
    places = [p.data_ptr() for p in params]
    optimizer = getattr(torch.optim, name)(params)
    with pytest.raises(ConfigError, match=f"{name} does not update every element .* leave elementwise=True away"):
        fuse_optimizer(optimizer, elementwise=True)
    assert not is_fused_optimizer(optimizer)
    assert [p.data_ptr() for p in params] == places


@pytest.mark.parametrize("name", ["Prodigy", "DAdaptAdan", "Adai", "SAM"])
def test_what_is_published_as_looking_at_all_parameters_cannot_be_declared(name):
    published = type(name, (Momentum,), {})
    for cls in (published, type("Mine", (published,), {})):
        with pytest.raises(ConfigError, match=f"{cls.__name__} does not update every element"):
            fuse_optimizer(cls(make_params()), elementwise=True)
        with pytest.warns(UserWarning, match=f"{cls.__name__} does not update every element"):
            fuse_optimizer(cls(make_params()))


@pytest.mark.parametrize("parent", [Own, torch.optim.SGD])
def test_a_class_that_must_stay_whole_says_so_for_its_subclasses(parent):
    class Reluctant(parent):
        _fuse_elementwise = False

    class Child(Reluctant):
        pass

    with pytest.raises(ConfigError, match="Child does not update"):
        fuse_optimizer(Child(make_params()), elementwise=True)
    with pytest.warns(UserWarning, match="Child does not update"):
        twins = Twins(Child)
    twins.run(counts=(0, 0))


def test_a_copy_keeps_the_declaration(recwarn):
    other = copy.deepcopy(fuse_optimizer(Momentum(make_params()), elementwise=True))
    fill_grads(other.param_groups[0]["params"], seed=0)
    other.fuse_step()
    assert fused_counts(other) == ALL
    assert not recwarn.list


def test_a_counter_written_through_data_is_followed():
    class CountsThroughData(Own):
        """Writes its counter in a way that no version counter shows."""

        def direction(self, p):
            count = self.state[p].setdefault("step", torch.zeros(()))
            count.data.add_(1)
            return p.grad / count.item()

    twins = Twins(CountsThroughData, elementwise=True)
    for step in range(8):
        twins.run(fuse=step % 3 != 1)
    assert fused_counts(twins.fused) == ALL


def test_a_group_without_parameters_is_fused_once_it_has_some():
    def as_sharded(params):
        optimizer = torch.optim.SGD([{"params": params}, {"params": make_params([(2,)])}], lr=0.1)
        optimizer.param_groups[1]["params"] = []
        return optimizer

    twins = Twins(as_sharded)
    for _ in range(2):
        twins.run(counts=ALL)
    for params, optimizer in twins.both:
        late = make_params([(4,), (5,)])
        optimizer.param_groups[1]["params"] = late
        params.extend(late)
    twins.run(counts=(2, len(SHAPES) + 2))
