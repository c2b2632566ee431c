"""Twins for the fuse tests: the same parameters and gradients for a plain and a fused optimizer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dgc.torch.fuse import fuse_optimizer

ALGORITHMS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}),
    "sgd-nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}),
    "sgd-dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 1e-2}),
    "adam-amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adam-foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adamw-amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "rmsprop-centered": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01, "t0": 20, "weight_decay": 1e-2}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 1e-3}),
}

SHAPES = ((3,), (7, 5), (1,), (64,), (33, 3), (2, 3, 5, 5), (129,))


def make_params(shapes=SHAPES, *, dtype=torch.float32, seed=0) -> list[torch.nn.Parameter]:
    """Parameters that every call makes alike."""
    random = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in shapes]


class Own(torch.optim.Optimizer):
    """SGD whose direction a subclass chooses."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.direction(p), alpha=-group["lr"])

    def direction(self, p):
        return p.grad


class LossScaled(torch.optim.Optimizer):
    """Element-wise; the larger the loss, the longer the step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = 1.0 if loss is None else float(loss)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * scale)
        return loss


def fill_grads(*twins: list[Tensor], seed: int, skip: tuple[int, ...] = (), keep: bool = False) -> None:
    """Give the i-th parameter of every list the same gradient: a fresh tensor, or in place with ``keep``."""
    random = torch.Generator().manual_seed(1000 + seed)
    for i, params in enumerate(zip(*twins, strict=True)):
        grad = torch.randn(params[0].shape, generator=random).to(params[0].dtype)
        for param in params:
            if i in skip:
                param.grad = None
            elif keep and param.grad is not None:
                param.grad.copy_(grad)
            else:
                param.grad = torch.empty_like(param).copy_(grad)


class Twins:
    """A plain and a fused optimizer on equal parameters; ``step`` moves both and ``assert_equal`` compares all."""

    def __init__(self, cls, options=None, shapes=SHAPES, *, dtype=torch.float32, make=None, **fuse_options) -> None:
        make = make or (lambda: make_params(shapes, dtype=dtype))
        self.plain_params, self.fused_params = make(), make()
        self.plain = cls(self.plain_params, **(options or {}))
        self.fused = fuse_optimizer(cls(self.fused_params, **(options or {})), **fuse_options)
        self.count = 0
        self.both = ((self.plain_params, self.plain), (self.fused_params, self.fused))
        self.steps = ((self.plain_params, self.plain.step), (self.fused_params, self.fused.fuse_step))

    def run(self, count=1, *, counts=None, **options) -> None:
        """Steps of both, equal after each; then ``counts`` are those of the last fused step."""
        for _ in range(count):
            self.step(**options)
            self.assert_equal()
        assert counts is None or fused_counts(self.fused) == counts

    def step(self, *, fuse=True, **grads) -> None:
        """One step of both on fresh equal gradients, the fused one by ``step()`` if ``fuse`` is False."""
        self.count += 1
        fill_grads(self.plain_params, self.fused_params, seed=self.count, **grads)
        self.plain.step()
        self.fused.fuse_step() if fuse else self.fused.step()

    def assert_equal(self) -> None:
        """Parameters, gradients and state_dict agree bit by bit, order of entries included."""
        for plain, fused in zip(self.plain_params, self.fused_params, strict=True):
            assert torch.equal(plain, fused)
            assert (plain.grad is None) == (fused.grad is None)
            if plain.grad is not None and plain.layout is plain.grad.layout:
                assert torch.equal(plain.grad, fused.grad)
        assert_same_state(self.plain.state_dict(), self.fused.state_dict())


def assert_same_state(expected: dict, actual: dict) -> None:
    """Two state_dicts have the same layout, order, types and values."""
    assert expected["param_groups"] == actual["param_groups"]
    assert list(expected["state"]) == list(actual["state"])
    for key, entries in expected["state"].items():
        assert list(entries) == list(actual["state"][key])
        for name, value in entries.items():
            other = actual["state"][key][name]
            if isinstance(value, Tensor):
                assert (value.shape, value.dtype, value.device) == (other.shape, other.dtype, other.device)
                assert torch.equal(value, other)
            else:
                assert type(value) is type(other)
                assert value == other


def fused_counts(optimizer) -> tuple[int, int]:
    """(fused parameters made, parameters inside them) of the last ``fuse_step``."""
    record = optimizer._dgc_fuse
    return record.fused_sets, record.fused_params


def count_calls(function) -> int:
    """Number of torch operations that ``function`` runs."""

    class Counter(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    with Counter() as counter:
        function()
    return counter.calls
