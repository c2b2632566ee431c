"""Comparing tensors bit by bit, also between ranks, whichever library connects them."""

import contextlib
import io
import re
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only
from worker_tools import launch_rank


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """(P, ...) every rank's tensor."""
    if dist.is_available() and dist.is_initialized():
        rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, tensor.contiguous())
        return torch.stack(rows)
    import horovod.torch as hvd

    global _count
    _count += 1
    return hvd.allgather(tensor.unsqueeze(0), name=f"gathered.{_count}")


_count = 0


def gathered_objects(value) -> list:
    """Every rank's value."""
    if dist.is_available() and dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values
    import horovod.torch as hvd

    return hvd.allgather_object(value, name="gathered objects")


def make_model(seed=0, width=64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 5))


def loss_of(model, step, *arguments, rank=None):
    """Of a rank's batch, of this one's if no other is named."""
    seed = 1000 * step + (launch_rank() if rank is None else rank)
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(seed))
    return nn.functional.cross_entropy(model(x, *arguments), x[:, :5].argmax(1))


def bits(tensors) -> torch.Tensor:
    return torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])


def as_bytes(saved):
    """A state with bytes in the place of tensors: states are equal if all bits are."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().contiguous().numpy().tobytes(), saved)


def assert_replicas_identical(parameters) -> None:
    """All ranks call this equally often."""
    rows = gathered(bits(parameters))
    assert all(torch.equal(rows[0], row) for row in rows)


def assert_bits_equal(actual, expected) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(bits([a]), bits([e])), f"tensor {i} differs in {(a != e).sum().item()} elements"


def twin(parameters) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in parameters]


def through_file(saved):
    """As a user's file would give it back."""
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@contextlib.contextmanager
def unpickling_is_an_error():
    """Inside, no bytes of another rank may be run as a pickle; torch's reader of ``weights_only=True`` is its own."""

    def refuse(*_, **__):
        raise AssertionError("a pickle was read")

    names = ["pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads"]
    names += ["torch.distributed.distributed_c10d._unpickler"] if dist.is_initialized() else []
    with contextlib.ExitStack() as patches:
        for name in names:
            if not name.startswith("cloudpickle") or not dist.is_initialized():
                patches.enter_context(patch(name, refuse))
        yield


def raises(error, match, function):
    """The error that is raised; fails when nothing or something else is."""
    try:
        function()
    except error as raised:
        found = raised
    else:
        raise AssertionError(f"{error} was not raised")
    assert re.search(match, str(found)), f"{match!r} not in {found}"
    return found
