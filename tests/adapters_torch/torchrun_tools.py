"""What cases under torchrun share; this initialises torch.distributed, and blocks imports of Horovod and mpi4py."""

from __future__ import annotations

import atexit
import hashlib
import re
import sys


class Missing:
    """Finds no module of these names."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("horovod", "mpi4py"):
            raise ImportError(f"{name} is not installed")


sys.meta_path.insert(0, Missing())

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

if not dist.is_initialized():
    dist.init_process_group("gloo")
    atexit.register(dist.destroy_process_group)

EXACT = {"sparsity": 0.0, "momentum_masking": False, "values": "float32", "small": "float32"}
SGD = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


def make_model(seed=0, width=64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 5))


def loss_of(model, step, *arguments):
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
    return nn.functional.cross_entropy(model(x, *arguments), x[:, :5].argmax(1))


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def digest(tensors):
    """Of the bits of a model's parameters, or of tensors."""
    tensors = tensors.parameters() if isinstance(tensors, nn.Module) else tensors
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def assert_identical(model):
    assert len(set(gathered(digest(model)))) == 1, "replicas differ"


def assert_close(actual, expected):
    """Within 1e-5 of the largest value of each parameter, or of each tensor of two lists."""
    if isinstance(actual, nn.Module):
        actual, expected = actual.parameters(), expected.parameters()
    for a, e in zip(actual, expected, strict=True):
        assert not a.numel() or (a - e).abs().max() <= 1e-5 * e.abs().max()


def on_every_rank(error, match, function):
    try:
        function()
        outcome = "nothing was raised"
    except error as raised:
        outcome = None if re.search(match, str(raised)) else str(raised)
    assert gathered(outcome) == [None] * dist.get_world_size(), outcome
