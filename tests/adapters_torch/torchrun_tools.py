"""What cases under torchrun share; this initialises torch.distributed, and blocks imports of Horovod and mpi4py."""

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
from adapters_torch.workers.tensors import loss_of, make_model  # noqa: E402
from torch import nn  # noqa: E402

if not dist.is_initialized():
    dist.init_process_group("gloo")
    atexit.register(dist.destroy_process_group)

EXACT = {"sparsity": 0.0, "momentum_masking": False, "values": "float32", "small": "float32"}
SGD = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.always, self.sometimes, self.never = (nn.Linear(20, 5) for _ in range(3))

    def forward(self, x, sometimes=False):
        return self.always(x) + self.sometimes(x) if sometimes else self.always(x)


def freezing(model, optimizer, of_rank_1=True):
    """Train while a layer is frozen on all ranks for some steps, and on rank 1 alone for some; one is never used."""
    layer = getattr(model, "module", model).sometimes
    for step in range(24):
        frozen = 6 <= step < 12 or (of_rank_1 and 16 <= step < 20 and dist.get_rank() == 1)
        layer.requires_grad_(not frozen)
        optimizer.zero_grad()
        loss_of(model, step, True).backward()
        optimizer.step()


def switching(model, optimizer):
    """Train while a layer is used by one rank, by the other, by none."""
    for step in range(24):
        optimizer.zero_grad()
        loss_of(model, step, step % 3 == dist.get_rank()).backward()
        optimizer.step()


def train(optimizer, model, steps=6, start=0, passes=1):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        for i in range(passes):
            loss_of(model, passes * step + i).backward()
        optimizer.step()


def dense(steps, passes=1, decay=0.01):
    """SGD on gradients that are averaged by hand."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), **{**SGD, "weight_decay": decay})
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(passes):
            loss_of(model, passes * step + i).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
    return model


def assert_frozen(model, optimizer, compression):
    """A frozen layer and what the compressor holds of it do not move by a bit; replicas are identical."""

    def seen():
        entries = compression.state_dict(own=True)["parameters"].items()
        held = [a for (_, entry), used in zip(entries, ours, strict=True) if used for a in entry.values()]
        return digest([torch.as_tensor(a) for a in held]), digest(layer.parameters())

    layer = getattr(model, "module", model).sometimes
    ours = ["sometimes" in name for name, _ in model.named_parameters()]
    for step in range(12):
        if step == 4:
            layer.requires_grad_(False)
            before = seen()
        optimizer.zero_grad()
        loss_of(model, step, True).backward()
        optimizer.step()
    assert seen() == before
    layer.requires_grad_(True)
    optimizer.zero_grad()
    loss_of(model, step, True).backward()
    optimizer.step()
    assert digest(layer.parameters()) != before[1]
    assert_identical(model)


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
