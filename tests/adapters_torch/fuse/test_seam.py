"""Optimizers that communicate around their step: Horovod's on real ranks, and any that describe themselves."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from adapters_torch.fuse.fuse_tools import LossScaled, Twins, fill_grads, fused_counts, make_params
from rank_jobs import each_case

from dgc.torch.fuse import fuse_optimizer
from dgc.torch.fuse.seam import StepSeam, resolve

KINDS = {"2ranks": {}, "1process": {"n": 1, "launcher": "single"}}

test_horovod = each_case(Path(__file__).parent / "workers" / "seam_cases.py", KINDS)


class Sharded(torch.optim.Optimizer):
    """Keeps an inner optimizer for half of the parameters, as an optimizer with sharded state does."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        owned = self.param_groups[0]["params"][::2]
        self.optim = torch.optim.Adam(owned, lr=0.1)
        self.calls = []

    def _push_options(self):
        self.calls.append("before")
        self.optim.param_groups[0]["lr"] = self.param_groups[0]["lr"]

    def _publish(self):
        self.calls.append("after")

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        self._push_options()
        self.optim.step()
        self._publish()
        return loss

    @contextlib.contextmanager
    def _around(self, compute):
        compute()
        self._push_options()
        yield
        self._publish()

    def _fuse_seam(self) -> StepSeam:
        return StepSeam(self.optim, type(self.optim), self._around)


def test_an_optimizer_that_describes_its_step():
    twins, hooks = Twins(Sharded), []
    twins.fused.register_step_pre_hook(lambda *_: hooks.append("outer"))
    twins.fused.optim.register_step_pre_hook(lambda *_: hooks.append("inner"))
    for step in range(4):
        for _, optimizer in twins.both:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        fill_grads(twins.plain_params, twins.fused_params, seed=step)
        twins.plain.step()
        assert twins.fused.fuse_step(lambda: "loss") == "loss"
        twins.assert_equal()
        assert fused_counts(twins.fused) == (1, 4)
    assert twins.fused.calls == twins.plain.calls
    assert hooks == ["outer", "inner"] * 4


def test_an_update_that_fails_is_made_known_before_the_error_is_raised():
    class Telling(Sharded):
        @contextlib.contextmanager
        def _around(self, compute):
            try:
                compute()
                yield
            except ValueError as error:
                self.calls.append(error)
                raise

    error = ValueError("no gradient today")

    def closure():
        raise error

    optimizer = fuse_optimizer(Telling(make_params()))
    with pytest.raises(ValueError, match="no gradient today"):
        optimizer.fuse_step(closure)
    assert optimizer.calls == [error]


def test_the_local_optimizer_gets_the_loss():
    class ShardedByLoss(Sharded):
        def __init__(self, params):
            super().__init__(params)
            self.optim = LossScaled(params[::2])

        def step(self, closure=None):
            self._push_options()
            return self.optim.step(closure)

    twins = Twins(ShardedByLoss, elementwise=True)
    fill_grads(twins.plain_params, twins.fused_params, seed=0)
    assert twins.plain.step(lambda: 3.0) == twins.fused.fuse_step(lambda: 3.0) == 3.0
    twins.assert_equal()
    assert fused_counts(twins.fused) == (1, 4)


def wrapped_like_horovod(cls):
    """A class as Horovod derives one at run time, with the synchronisation recorded."""

    def synchronize(self):
        self.calls.append("synchronize")
        self._synchronized = True

    def step(self, closure=None):
        raise AssertionError("the wrapper's own step must not run")

    members = {"synchronize": synchronize, "skip_synchronize": None, "step": step}
    return type(cls.__name__, (cls,), {**members, "_should_synchronize": True, "_synchronized": False, "calls": []})


def test_the_update_class_is_the_one_behind_the_wrapper():
    params = make_params()
    optimizer = wrapped_like_horovod(torch.optim.SGD)(params, lr=0.1)
    assert resolve(optimizer).update_class is torch.optim.SGD
    fuse_optimizer(optimizer)
    fill_grads(params, seed=0)
    expected = [p.detach() - 0.1 * p.grad for p in params]
    optimizer.fuse_step()
    assert optimizer.calls == ["synchronize"]
    assert optimizer._synchronized is False
    for p, value in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), value)


def test_the_optimizer_behind_the_wrapper_gets_the_loss():
    params = make_params()
    optimizer = fuse_optimizer(wrapped_like_horovod(LossScaled)(params, lr=0.1), elementwise=True)
    fill_grads(params, seed=0)
    expected = [p.detach() - 0.3 * p.grad for p in params]
    assert optimizer.fuse_step(lambda: 3.0) == 3.0
    assert optimizer.calls == ["synchronize"]
    assert fused_counts(optimizer) == (1, len(params))
    for p, value in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), value)


def test_a_wrapped_optimizer_that_is_not_known_steps_as_the_wrapper_does():
    steps = []
    cls = wrapped_like_horovod(LossScaled)
    cls.step = lambda self, closure=None: steps.append(closure)
    with pytest.warns(UserWarning, match="LossScaled is not known"):
        optimizer = fuse_optimizer(cls(make_params()))
    optimizer.fuse_step(len)
    assert steps == [len]


def test_nothing_is_exchanged_inside_skip_synchronize():
    params = make_params()
    optimizer = fuse_optimizer(wrapped_like_horovod(torch.optim.SGD)(params, lr=0.1))
    fill_grads(params, seed=0)
    optimizer.synchronize()
    optimizer._should_synchronize = False
    optimizer.fuse_step()
    assert optimizer.calls == ["synchronize"]
    assert optimizer._synchronized is False


def test_a_wrapper_around_a_wrapper_and_around_one_that_describes_itself():
    twice = wrapped_like_horovod(wrapped_like_horovod(torch.optim.SGD))(make_params(), lr=0.1)
    assert resolve(twice).update_class is torch.optim.SGD

    wrapped = wrapped_like_horovod(Sharded)(make_params())
    wrapped.calls = []
    seam = resolve(wrapped)
    assert seam.local is wrapped.optim
    with seam.around(lambda: wrapped.calls.append("closure")):
        assert wrapped.calls == ["closure", "synchronize", "before"]
    assert wrapped.calls[3:] == ["after"]


def test_a_wrapper_that_describes_itself_is_believed():
    cls = wrapped_like_horovod(torch.optim.SGD)

    @contextlib.contextmanager
    def around(self, compute):
        compute()
        yield
        self.calls.append("mine")

    cls._fuse_seam = lambda self: StepSeam(self, torch.optim.SGD, lambda compute: around(self, compute))
    optimizer = cls(make_params(), lr=0.1)
    fuse_optimizer(optimizer)
    optimizer.fuse_step()
    assert optimizer.calls == ["mine"]
