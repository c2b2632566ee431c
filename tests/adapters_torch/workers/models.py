"""Models, data and short training runs that the torch worker cases share. Everything is seeded by step and rank."""

import contextlib
import copy
import tempfile
import time
import warnings
from pathlib import Path

import horovod.torch as hvd
import torch
from adapters_torch.workers.tensors import raises
from torch import nn
from worker_tools import close_later

import dgc.torch as dgc

EXACT = {"sparsity": 0.0, "momentum_masking": False, "values": "float32"}

OPTIMIZERS = {
    "plain": {"momentum": 0.0},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "decay": {"momentum": 0.9, "weight_decay": 0.01},
    "nesterov decay": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}


class Net(nn.Module):
    """Two branches, of which a forward pass may use one; a frozen layer; biases that are sent dense."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(20, width)
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width)
        self.last = nn.Linear(width, 10)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, branch: str = "both") -> torch.Tensor:
        x = torch.relu(self.first(x))
        y = 0
        if branch in ("both", "left"):
            y = y + self.left(x)
        if branch in ("both", "right"):
            y = y + self.right(x)
        return self.last(torch.relu(self.frozen(torch.relu(y))))


def make_model(seed: int = 0, **kwargs) -> nn.Module:
    torch.manual_seed(seed)
    return Net(**kwargs)


def batch(step: int, rank: int | None = None, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + (hvd.rank() if rank is None else rank))
    return torch.randn(size, 20, generator=generator), torch.randint(0, 10, (size,), generator=generator)


def wrap(way: str, model: nn.Module, optimizer: torch.optim.Optimizer, *, hvd_options=None, **options):
    """Turn on compression the way the user does; returns (optimizer, compressor), which is closed after the case."""
    hvd_options = hvd_options or {}
    if way == "a":
        compression = dgc.Compression.dgc(model.named_parameters(), optimizer=optimizer, **options)
        wrapped = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression, **hvd_options
        )
    else:
        compression = dgc.Compression.dgc(**options)
        wrapped = dgc.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression, **hvd_options
        )
    return wrapped, close_later(compression)


def each_way(make=None, **options):
    """Yield (way, model, optimizer, compressor) with Horovod's and dgc's optimizer; of SGD, or what ``make`` gives."""
    for way in "ab":
        model = make_model()
        yield way, model, *wrap(way, model, (make or sgd)(model), **options)


def loss_of(model: nn.Module, step: int, branch: str = "both", rank: int | None = None) -> torch.Tensor:
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x, branch), y)


def dense_backward(model, step, branch=lambda rank, step: "both", op="average"):
    """Add the mean, or the sum, of all ranks' gradients, computed here."""
    for rank in range(hvd.size()):
        (loss_of(model, step, branch(rank, step), rank) / (hvd.size() if op == "average" else 1)).backward()


def train(optimizer, model, steps, *, start=0, branch=lambda step: "both", after=None):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, step, branch(step)).backward()
        optimizer.step()
        if after:
            after(step)


def dense_reference(
    model: nn.Module,
    steps: int,
    *,
    lr=0.1,
    op="average",
    schedule=None,
    branch=lambda rank, step: "both",
    before=lambda model, step: None,
    make=None,
    **sgd,
):
    """A plain optimizer, of SGD or what ``make`` gives, on the ranks' averaged gradients; returns the trained copy."""
    model = copy.deepcopy(model)
    optimizer = make(model) if make else torch.optim.SGD(model.parameters(), lr=lr, **sgd)
    scheduler = schedule(optimizer) if schedule else None
    for step in range(steps):
        before(model, step)
        optimizer.zero_grad()
        dense_backward(model, step, branch, op)
        optimizer.step()
        if scheduler:
            scheduler.step()
    return model


def worst_difference(actual: nn.Module, expected: nn.Module) -> float:
    """Largest difference of any tensor, relative to that tensor's largest entry."""
    pairs = zip(actual.parameters(), expected.parameters(), strict=True)
    return max(((a - e).abs().max() / e.abs().max()).item() for a, e in pairs)


def assert_replicas_identical(model: nn.Module, name: str = "") -> None:
    flat = torch.cat([p.detach().reshape(-1).view(torch.uint8) for p in model.parameters()])
    gathered = hvd.allgather(flat.unsqueeze(0), name=f"replicas.{name}")
    for rank in range(1, hvd.size()):
        assert torch.equal(gathered[0], gathered[rank]), f"rank {rank} differs from rank 0"


def distribute(way, model, optimizer, hvd_options=None, **options):
    """Wrapped by stock Horovod without compression ("dense"), or as by :func:`wrap`."""
    if way != "dense":
        return wrap(way, model, optimizer, hvd_options=hvd_options, **options)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **(hvd_options or {})), None


def close(compression):
    if compression is not None:
        compression.close()


def broadcast(model, optimizer):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def quiet(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


UPDATES = {
    "clip": (1, True),
    "clip, no skip": (1, False),
    "clip twice": (3, False),
    "mixed": None,
}
"""How often ``synchronize()`` is called in a step, with clipping after the first, and whether step() skips it."""


def run_steps(way, make, update, *, passes=1, scale="", limit=0.5, hvd_options=None, **options):
    """Eight steps that clip: one comes before its last pass, one may overflow. Returns model and compressor."""
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7, enabled=bool(scale))
    if scale and way != "dense":
        options["loss_scale"] = scaler
    hvd_options = {"backward_passes_per_step": passes, **(hvd_options or {})}
    optimizer, compression = distribute(way, model, make(model), hvd_options, **options)
    for step in range(8):
        optimizer.zero_grad()
        for i in range(1 if step == 3 else passes):
            overflows = scale == "overflow" and step == 5 and hvd.rank() == 1
            scaler.scale(loss_of(model, step * passes + i) * (float("inf") if overflows else 1.0)).backward()
        times, skips = UPDATES[update] or list(UPDATES.values())[step % 3]
        for i in range(times):
            optimizer.synchronize()
            if i == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), limit)
        with optimizer.skip_synchronize() if skips else contextlib.nullcontext():
            quiet(scaler.step, optimizer)
        scaler.update()
    return model, compression


SECONDS = 250
"""An error that takes longer than this counts as a hang."""


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def on_every_rank(error, match, function, way=""):
    """``function`` must raise on this rank, and on all others, soon."""
    start = time.monotonic()
    try:
        raised = raises(error, match, function)
    except Exception as wrong:
        raised = AssertionError(f"{type(wrong).__name__}: {wrong}")
    seconds = time.monotonic() - start
    # Always gathered, so that a wrong outcome on one rank is reported and hangs nobody.
    outcomes = hvd.allgather_object((isinstance(raised, error), seconds, str(raised)), name=f"outcome {way} {match}")
    assert all(good and took < SECONDS for good, took, _ in outcomes), outcomes
    return raised


def shared_folder(name: str) -> Path:
    """A fresh directory that all ranks know."""
    folder = tempfile.mkdtemp(prefix="dgc-resume-") if hvd.rank() == 0 else None
    return Path(hvd.broadcast_object(folder, name=f"folder {name}"))


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
