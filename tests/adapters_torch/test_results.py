"""Whether a step was applied or dropped, as the torch engine sees it; ranks are threads of this process."""

import warnings

import numpy as np
import pytest
import torch

from dgc.core.compressors import make_config
from dgc.torch.engine import Engine
from dgc.transport.local import run_ranks

EXACT = {"sparsity": 0.0, "momentum_masking": False, "values": "float32"}
SHAPES = {"weight": (48, 40), "bias": (48,)}


class Training:
    """A model of two tensors, an optimizer whose momentum is adopted, and the engine in between."""

    def __init__(self, transport, momentum=0.9, owned=True, shapes=None, **options):
        generator = torch.Generator().manual_seed(0)
        self.rank = transport.rank
        self.shapes = SHAPES if shapes is None else shapes
        self.parameters = [torch.randn(s, generator=generator).requires_grad_() for s in self.shapes.values()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=momentum)
        named = list(zip(self.shapes, self.parameters, strict=True))
        self.engine = Engine(named, make_config(options), transport, optimizer=self.optimizer)
        if owned:
            self.engine.watch.own(self.optimizer)

    def gradients(self, call, scale=1.0):
        generator = torch.Generator().manual_seed(10 * call + self.rank)
        used = {name: 0.0 if name.startswith("unused") else scale for name in self.shapes}
        return [used[name] * torch.randn(shape, generator=generator) for name, shape in self.shapes.items()]

    def exchange(self, call, scale=1.0):
        """What a backward pass and ``synchronize()`` do."""
        for p, g in zip(self.parameters, self.gradients(call, scale), strict=True):
            p.grad = g if p.grad is None else p.grad.add_(g)
        for i, p in enumerate(self.parameters):
            p.grad = self.engine.submit(i, p.grad)
        self.engine.finish()

    def train(self, calls):
        for call in calls:
            self.exchange(call)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self):
        saved = self.engine.state_dict()
        return {f"{n} {k}": a.tobytes() for n, e in saved["parameters"].items() for k, a in e.items()}, saved["step"]

    @property
    def step(self):
        return self.engine.describe()["step"]

    def values(self):
        return [p.detach().clone() for p in self.parameters]


def on_two_ranks(function):
    return run_ranks(2, function)


def test_what_was_sent_returns_and_a_warning_says_so_once():
    def one_rank(transport):
        t = Training(transport, momentum=0.0, sparsity=0.99, values="float32")
        start, given = t.values()[0], torch.zeros(SHAPES["weight"])
        for call in range(8):
            given += t.gradients(call)[0]
            t.exchange(call)
            if call not in (0, 3, 4):
                t.optimizer.step()
            t.optimizer.zero_grad()
        assert t.step == 8
        residual = t.engine.state_dict()["parameters"]["weight"]["v"].reshape(SHAPES["weight"])
        return given.numpy(), residual, ((start - t.values()[0]) / 0.1).numpy()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (given_0, rest_0, moved_0), (given_1, rest_1, moved_1) = on_two_ranks(one_rank)
    assert len([w for w in caught if "not applied by step()" in str(w.message)]) == 2  # one on each rank
    np.testing.assert_array_equal(moved_0, moved_1)
    np.testing.assert_allclose(2 * moved_0 + rest_0 + rest_1, given_0 + given_1, atol=2e-4)


def step_of_the_owner(t):
    t.optimizer.step()


def step_of_another(t):
    torch.optim.SGD(t.parameters, lr=0.1).step()


def by_hand(t):
    for p in t.parameters:
        p.data.add_(p.grad, alpha=-0.1)
    t.engine.applied()


def keeps_what_is_applied(t, apply):
    """Four steps, each of which counts."""
    for call in range(4):
        t.exchange(call)
        after = t.state()
        apply(t)
        t.optimizer.zero_grad()
        assert t.state() == after
    assert t.step == 4


@pytest.mark.parametrize("apply", [step_of_the_owner, step_of_another, by_hand])
def test_what_was_applied_counts(apply):
    def one_rank(transport):
        t = Training(transport, sparsity=0.9)
        keeps_what_is_applied(t, apply)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_two_ranks(one_rank)


def test_what_a_closure_exchanged_is_applied():
    """The step begins before its gradients are exchanged; a line search may evaluate its closure several times."""

    def one_rank(transport):
        t = Training(transport, sparsity=0.9)

        def closure():
            for call in range(2):
                t.optimizer.zero_grad()
                t.exchange(call)
            return 0.0

        t.optimizer.step(closure)
        t.optimizer.zero_grad()
        assert t.step == 2
        t.exchange(2)
        t.optimizer.zero_grad()
        assert t.step == 3

    on_two_ranks(one_rank)


def test_an_optimizer_is_not_kept_alive_by_its_zero_grad():
    def one_rank(transport):
        import gc
        import weakref

        t = Training(transport, sparsity=0.9)
        found = weakref.ref(t.optimizer)
        gc.collect()
        gc.disable()
        try:
            del t.optimizer
            t.engine.adoption._before = []
            return found() is None
        finally:
            gc.enable()

    assert run_ranks(1, one_rank) == [True]
