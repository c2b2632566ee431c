"""What the sharded optimizer's worker cases share: a model, averaged gradients, and bitwise comparison."""

from __future__ import annotations

import copy

import horovod.torch as hvd
import torch
from torch import nn

from dgc.torch.zero import ZeroRedundancyOptimizer as Zero

OPTIMIZERS = {
    "adam": (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95)}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


def make_model(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 19), nn.Linear(19, 13, bias=False), nn.Linear(13, 5), nn.Linear(5, 3))


def parameters_of_sizes(*sizes: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(n, generator=generator)) for n in sizes]


def set_mean_gradients(parameters, step: int, size: int | None = None, density: float = 1.0) -> None:
    """The mean of all ranks' gradients, computed the same way by everybody."""
    size = hvd.size() if size is None else size
    for i, p in enumerate(parameters):
        if not p.requires_grad:
            continue
        total = torch.zeros(p.shape, dtype=torch.float32)
        for rank in range(size):
            generator = torch.Generator().manual_seed(100_000 * step + 100 * i + rank)
            total += torch.randn(p.shape, generator=generator)
            if density < 1:
                total *= torch.rand(p.shape, generator=generator) < density
        p.grad = (total / size).to(p.dtype).to(p.device)


def assert_bits_equal(actual, expected) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        a, e = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, e))
        assert torch.equal(a, e), f"tensor {i} differs in {(a != e).sum().item()} bytes"


_count = 0


def assert_replicas_identical(parameters, process_set=hvd.global_process_set) -> None:
    """All ranks call this equally often."""
    global _count
    _count += 1
    flat = torch.cat([p.detach().contiguous().view(-1).view(torch.uint8) for p in parameters])
    gathered = hvd.allgather(
        flat.unsqueeze(0), name=f"same.{_count}.{process_set.process_set_id}", process_set=process_set
    )
    for rank in range(1, gathered.shape[0]):
        assert torch.equal(gathered[0], gathered[rank]), f"rank {rank} differs from rank 0"


def twin(parameters):
    return [nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in parameters]


def assert_state_dicts_equal(actual, expected) -> None:
    assert actual["state"].keys() == expected["state"].keys()
    for key, entry in expected["state"].items():
        assert actual["state"][key].keys() == entry.keys()
        for name, value in entry.items():
            found = actual["state"][key][name]
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(value)), f"{key} {name}"
    assert actual["param_groups"] == expected["param_groups"]


def frozen_copy(state_dict):
    """To see later that nobody touched it."""
    return copy.deepcopy(state_dict)


def raises(error, match, function):
    import re

    try:
        function()
    except error as raised:
        found = raised
    else:
        raise AssertionError(f"{error.__name__} was not raised")
    assert re.search(match, str(found)), f"{match!r} not in {found}"
    return found


def pair(cls, options, parameters=None, **zero_options):
    """A sharded optimizer and an unsharded one on copies of the same parameters."""
    own = list(make_model().parameters()) if parameters is None else parameters
    plain_parameters = twin(own)
    return Zero(own, cls, **zero_options, **options), cls(plain_parameters, **options), own, plain_parameters


def step_both(zero, plain, own, other, steps, start=0, density=1.0):
    for step in range(start, start + steps):
        for optimizer, parameters in ((zero, own), (plain, other)):
            optimizer.zero_grad()
            set_mean_gradients(parameters, step, density=density)
            optimizer.step()
    assert_bits_equal(own, other)
    assert_replicas_identical(own)
