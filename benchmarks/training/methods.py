"""The methods: who exchanges gradients, and how. Each has a model and an optimizer of its own."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from training.models import Task

ALONE = ("none", "none-fused")
"""Exchange nothing: what a step costs without a network."""
MEETING = "none-meeting"
"""Plain SGD whose ranks wait for each other before each update, and send nothing: what any exchange costs at least."""
FAMILY = ("topk", "qsgd", "onebit")
HALVES = "dgc-b-halves"
"""Our wrapper with positions and values of 16 bits, and small tensors in 8."""
BUCKETS = {"dgc-b-4mib": 4, "dgc-b-100mib": 100}
"""Buckets of other sizes than the default, 25 MiB; a tensor is never cut."""
EXCHANGES = {
    f"{exchange}-{percent:g}": {"exchange": exchange, "sparsity": 1 - percent / 100}
    for percent in (0.1, 5)
    for exchange in ("gather", "auto")
}
"""Our wrapper with each exchange; 0.1 or 5 % of the entries are sent."""
STEPS = {"dgc-steps": 10_000}
"""Our wrapper as the pages recommend it, with the ``steps=`` of a training of this length."""
OURS = ("dgc-a", "dgc-b", *STEPS, HALVES, *BUCKETS, *FAMILY, *EXCHANGES)
METHODS = (*ALONE, MEETING, "dense", "fp16", *OURS, "powersgd")
DENSITY = 0.001


@dataclass
class Trained:
    """What takes steps, and what counts them, where something does."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    compression: Any = None


def make(method: str, task: Task, weight_decay: float | None = None) -> Trained:
    """Build a method's model, the same on all ranks, and its optimizer. Horovod is initialised, but for those ALONE."""
    torch.manual_seed(1)
    model = task.build()
    given = dict(task.options)
    if weight_decay is not None:
        given["weight_decay"] = weight_decay
    if method == "none-fused":
        given["fused"] = True
    optimizer = task.optimizer(model.parameters(), **given)
    if method in ALONE:
        return Trained(model, optimizer)
    if method == MEETING:
        optimizer.register_step_pre_hook(_meet)
        return Trained(model, optimizer)
    if method == "powersgd":
        return Trained(_powersgd(model), optimizer)
    import horovod.torch as hvd

    import dgc.torch as dgc

    # Methods share a process: Horovod's names of their tensors must differ.
    named = [(f"{method}.{name}", parameter) for name, parameter in model.named_parameters()]
    if method in ("dense", "fp16"):
        compression = hvd.Compression.fp16 if method == "fp16" else hvd.Compression.none
        return Trained(model, hvd.DistributedOptimizer(optimizer, named, compression=compression))
    if method == "dgc-a":
        compression = dgc.Compression.dgc(named, optimizer=optimizer, sparsity=1 - DENSITY)
        return Trained(model, hvd.DistributedOptimizer(optimizer, named, compression=compression), compression)
    name = "dgc" if method in EXCHANGES else method.partition("-")[0]
    options: dict[str, Any] = {} if name in ("qsgd", "onebit") else {"sparsity": 1 - DENSITY}
    options.update(EXCHANGES.get(method, {}))
    if method in STEPS:
        options = {"steps": STEPS[method]}
    if method in BUCKETS:
        options["bucket_bytes"] = BUCKETS[method] * 2**20
    if method == HALVES:
        options.update(indices="uint16", values="float16", small="int8")
    compression = getattr(dgc.Compression, name)(**options)
    return Trained(model, dgc.DistributedOptimizer(optimizer, named, compression=compression), compression)


def _meet(*_: Any) -> None:
    """Wait for all ranks without a core."""
    from mpi4py import MPI

    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        time.sleep(50e-6)


def _powersgd(model: nn.Module) -> nn.Module:
    """PyTorch's own: DistributedDataParallel over Gloo with its PowerSGD hook (Vogels et al., 2019), rank 1."""
    import horovod.torch as hvd
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

    if not dist.is_initialized():
        meeting = hvd.broadcast_object(socket.gethostname() if "DGC_LAB" in os.environ else "127.0.0.1", 0)
        dist.init_process_group("gloo", f"tcp://{meeting}:29577", rank=hvd.rank(), world_size=hvd.size())
    # One bucket: the hook begins a bucket's second collective when its first one ends, and with several buckets Gloo's
    # threads do so in another order on each rank, and wait for ever.
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=10_000)
    # Its first steps are dense: with error feedback at least two.
    state = hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, hook.powerSGD_hook)
    return wrapped
