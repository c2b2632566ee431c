"""Let ranks with fewer batches take part in the others' steps: ``dgc.torch.join``, like ``hvd.join()``.

A joined rank submits zeros, so that its momentum and residual are still sent, and its messages carry the joined flag.
After each such step it copies the options of a rank that trains, and makes the same update. When every rank has set the
flag, no rank had a gradient, and the exchange is undone.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from dgc.adapter.agreement import built_together, gather_if_different
from dgc.core.message import Flags
from dgc.errors import ConfigError, LayoutError
from dgc.torch.adoption import updater_of
from dgc.torch.compressor import DGCCompressor
from dgc.torch.distributed import TorchJob
from dgc.torch.engine import Engine
from dgc.torch.joined_options import option_values, set_option_values
from dgc.torch.packing import broadcast_packed, packed, unpacked
from dgc.torch.step_ahead import StepAheadEngine
from dgc.torch.tensors import is_sharded

_DIVISORS = {"all": Flags.JOINED, "training": Flags.JOINED | Flags.BY_TRAINING}


def join(compression: DGCCompressor, divide_by: str = "all") -> int:
    """Take part, without data, in the steps of ranks that still train, until all ranks have joined. Collective.

    Afterwards all ranks have the parameters, optimizer state and options (the learning rate) of the last rank; each
    keeps its own residuals. Buffers of the model are not broadcast.

    Args:
        compression: the compressor of ``dgc.torch.DistributedOptimizer``, or of Horovod's ``DistributedOptimizer``.
        divide_by: the divisor of the sum of gradients. "all": the number of ranks, as in ``hvd.join()``. "training":
            the number of ranks that had not joined in the step before. It must be the same on all ranks.

    Returns:
        The rank that joined last (the highest of several), from which to broadcast; 0 if this process exchanges
        nothing.

    Raises:
        ConfigError: ``divide_by`` is unknown, the compressor is not bound, or ``hierarchical=True`` or a sharded
            optimizer is used.
        LayoutError: it was called between ``backward()`` and ``step()``.
        DGCError: this or another rank failed.
    """
    if not (isinstance(compression, DGCCompressor) and compression.is_bound):
        raise ConfigError(f"join({compression!r}): give it the compressor of dgc.torch.DistributedOptimizer")
    engine = compression.engine
    if divide_by not in _DIVISORS:
        wrong = ConfigError(f"divide_by={divide_by!r}; allowed: {', '.join(map(repr, _DIVISORS))}")
        if engine is not None:
            engine.fail(wrong)
        raise wrong
    if engine is None:
        return 0
    if isinstance(engine, StepAheadEngine):
        if divide_by != "all":
            engine.fail(ConfigError('with step-ahead error feedback, join() takes only divide_by="all"'))
        joined: Any = compression.job()
        return int(joined.ranks()[engine.join()])
    optimizer: Any = engine.front_end.owner
    _require_able(engine, optimizer)
    engine.joins = _DIVISORS[divide_by]
    try:
        last = engine.until_all_joined(lambda: _step(engine, optimizer))
        _clear(engine)
    finally:
        engine.joins = 0
    job: Any = compression.job()
    _take_over_from_root(engine, optimizer, job, last)
    return job.ranks()[last]


def _require_able(engine: Engine, optimizer: object) -> None:
    if engine.exchange.in_step:
        engine.fail(LayoutError("join() was called between backward() and step(); call it after step()"))
    if not hasattr(optimizer, "skip_synchronize"):
        engine.fail(ConfigError("join() steps the optimizer: wrap it with dgc.torch.DistributedOptimizer"))
    if engine.between.inside is not None:
        engine.fail(ConfigError("join() needs a message of each rank: leave out hierarchical=True"))
    if any(is_sharded(p) for p in engine.parameters):
        engine.fail(ConfigError("join() cannot step FSDP's shards: give every rank the same number of steps"))
    if updater_of(optimizer) is not optimizer:
        engine.fail(ConfigError("join() cannot step a sharded optimizer: give every rank the same number of steps"))


def _step(engine: Engine, optimizer: Any) -> None:
    """Exchange without data. If ranks still train, make the same update as they, unless it would change nothing."""
    _clear(engine)
    optimizer.synchronize()
    if len(engine.exchange.joined) < engine.transport.size and engine.follows:
        with optimizer.skip_synchronize():
            optimizer.step()


def _clear(engine: Engine) -> None:
    """Clear every gradient, whether it holds a result or a sum of backward passes that was not exchanged."""
    engine.front_end.give_up()
    for p in engine.parameters:
        p.grad = None
    engine.results_cleared()


def _take_over_from_root(engine: Engine, optimizer: Any, job: TorchJob, root: int) -> None:
    """Copy options, parameters, optimizer state and shared momentum from the rank ``root`` to the other ranks.

    Nothing is copied if they are equal on all ranks.
    """
    exchange, transport = engine.exchange, engine.transport
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    momentum = exchange.state.shared_momentum(exchange.schedule.begin)
    content = {
        "options": option_values(optimizer),
        "parameters": [p.detach() for p in parameters],
        "state": [dict(optimizer.state.get(p, {})) for p in parameters],
        "momentum": {i: torch.from_numpy(u) for i, u in momentum.items()},
    }
    own = built_together(transport, lambda: packed(content, f"the state of {type(optimizer).__name__}"))
    if gather_if_different(transport, {"content": hashlib.sha256(own.tobytes()).hexdigest()}) is None:
        return
    device = parameters[0].device
    came = broadcast_packed(job, own, root, device)
    if transport.rank == root:
        return
    loaded = unpacked(came, lambda storage, place: _moved_storage(storage, place, device))
    set_option_values(optimizer, loaded["options"])
    with torch.no_grad():
        for p, values, entries in zip(parameters, loaded["parameters"], loaded["state"], strict=True):
            p.copy_(values)
            if entries or p in optimizer.state:
                optimizer.state[p] = entries
    for i, u in loaded["momentum"].items():
        exchange.state.set_momentum_buffer(i, u.numpy())


def _moved_storage(storage: torch.UntypedStorage, place: str, device: torch.device) -> torch.UntypedStorage:
    """Move memory from another rank's device, which may not exist here, to this rank's; host memory stays as it is."""
    return storage if place == "cpu" else storage.to(device=device)
