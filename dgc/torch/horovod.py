"""Horovod for torch, or an error that says how to get it; and small questions to all ranks."""

from __future__ import annotations

import contextlib
import json
import time
from types import ModuleType
from typing import Any

import numpy as np
import torch

from dgc.errors import ConfigError, RemoteError, TransportError

INSTALL_HINT = "Build Horovod for the installed PyTorch with: python -m dgc build-horovod --install"

_PATIENCE = 10.0
"""Seconds that collectives of a step that was given up are waited for."""


def import_horovod(initialized: bool = True) -> ModuleType:
    """Import ``horovod.torch``.

    Args:
        initialized: also require that ``hvd.init()`` has been called.

    Raises:
        ConfigError: Horovod is missing, was built without or for another PyTorch, or is not initialised.
    """
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise ConfigError(
            f"dgc.torch needs Horovod, and importing horovod.torch failed: {error}. {INSTALL_HINT}"
        ) from error
    if not hasattr(hvd, "allreduce"):
        # horovod.torch imports without its extension, prints a warning and has no collectives.
        raise ConfigError(f"Horovod is installed, but was built without PyTorch. {INSTALL_HINT}")
    if initialized and not hvd.is_initialized():
        raise ConfigError("Horovod is not initialised: call hvd.init() before anything of dgc.torch")
    return hvd


def member_set(process_set: Any = None) -> Any:
    """The Horovod process set to use, with this process in it.

    Args:
        process_set: a ``hvd.ProcessSet``, or None for all ranks.

    Raises:
        ConfigError: Horovod is not ready, does not know the set, or this process is not in it.
    """
    hvd = import_horovod()
    chosen = hvd.global_process_set if process_set is None else process_set
    if getattr(chosen, "process_set_id", None) is None:
        raise ConfigError(
            f"Horovod does not know {chosen}: give it to hvd.init(process_sets=[...]) or hvd.add_process_set(...)"
        )
    if chosen.process_set_id != 0 and chosen.included() is False:
        raise ConfigError(f"rank {hvd.rank()} is not in {chosen}: only its members exchange gradients through it")
    return chosen


def gather_values(value: Any, question: str, process_set: Any) -> list[Any]:
    """Ask all ranks of ``process_set`` for a small value. Collective, on Horovod's own channel.

    Args:
        value: what this rank answers; JSON must know it.
        question: names the collective; the same on all ranks, and not asked twice at the same time.
        process_set: as returned by :func:`member_set`.

    Returns:
        Every rank's value in rank order.

    Raises:
        TransportError: Horovod's collective failed.
    """
    hvd = import_horovod()
    # One line per rank: Horovod joins arrays of different lengths, and JSON has no line ends of its own.
    line = np.frombuffer((json.dumps(value) + "\n").encode(), np.uint8).copy()
    try:
        handle = hvd.allgather_async(
            torch.from_numpy(line), name=f"dgc.{process_set.process_set_id}.{question}", process_set=process_set
        )
        lines = hvd.synchronize(handle).numpy().tobytes().decode()
    except (RuntimeError, ValueError) as error:
        raise TransportError(f"Horovod could not ask all ranks ({question}): {error}") from error
    return [json.loads(text) for text in lines.splitlines()]


def has_begun(optimizer: Any) -> bool:
    """Whether a backward pass has run for a step that ``optimizer``, a Horovod optimizer, has not finished."""
    passes = optimizer.backward_passes_per_step
    return bool(optimizer._handles) or any(left != passes for left in optimizer._allreduce_delay.values())


def averages_first_pass(optimizer: Any) -> bool:
    """Whether a Horovod optimizer hands over each gradient in the backward pass that computes it."""
    return getattr(optimizer, "backward_passes_per_step", 0) == 1 and getattr(optimizer, "_groups", None) is None


def is_averaged(optimizer: Any) -> bool:
    """Whether ``synchronize()`` has averaged the gradients of ``optimizer``, and no backward pass came after it."""
    passes = optimizer.backward_passes_per_step
    return (
        optimizer._synchronized
        and all(left == passes for left in optimizer._allreduce_delay.values())
        and any(p.grad is not None for p in optimizer._requires_update)  # clearing all of them ends the step
    )


def give_up_step(optimizer: Any, stand_ins: bool) -> None:
    """Let a Horovod optimizer forget the gradients of a step that an error ended; the next backward pass begins anew.

    Args:
        optimizer: what ``hvd.DistributedOptimizer`` returned.
        stand_ins: whether its own collectives carry something of every gradient. The ranks may have come to different
            places of the step: each begins what is missing, so that no collective is matched with one of a later step.

    Raises:
        RemoteError: another rank has not begun the step.
    """
    from horovod.torch import mpi_ops

    handles = optimizer._handles
    if stand_ins and optimizer._groups is None and any(handle is not None for handle, _ in handles.values()):
        for p in optimizer._requires_update:
            if (p not in handles or handles[p][0] is None) and not (p.grad is not None and p.grad.is_sparse):
                before = p.grad
                handles[p] = optimizer._allreduce_grad_async(p)
                p.grad = before
    deadline = time.monotonic() + _PATIENCE
    for handle, _ in handles.values():
        while not callable(handle) and handle in mpi_ops._handle_map:
            if mpi_ops.poll(handle):
                with contextlib.suppress(RuntimeError):
                    mpi_ops.synchronize(handle)
            elif time.monotonic() > deadline:
                raise RemoteError(
                    "another rank has not come to the step that failed here: after an exception that some ranks met "
                    "before their first gradient, restart the job from a checkpoint"
                )
            else:
                time.sleep(0.001)
    handles.clear()
    for group in getattr(optimizer, "_group_counts", ()):
        optimizer._group_counts[group] = 0
    optimizer._synchronized = False
    optimizer._should_synchronize = True
    optimizer.set_backward_passes_per_step(optimizer.backward_passes_per_step)
