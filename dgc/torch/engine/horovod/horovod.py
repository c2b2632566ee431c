"""Horovod for torch, or an error that says how to get it; and small questions to all ranks."""

from __future__ import annotations

import contextlib
import time
from types import ModuleType
from typing import Any

import numpy as np
import torch

from dgc.adapter.horovod import Horovod
from dgc.errors import RemoteError, TransportError
from dgc.torch.engine.horovod.held import hold

_PATIENCE = 10.0
"""Seconds that collectives of a step that was given up are waited for."""


class TorchHorovod(Horovod):
    """Horovod for torch."""

    framework = "PyTorch"
    module_name = "horovod.torch"
    package = "dgc.torch"

    def load(self) -> ModuleType:  # noqa: D102
        import horovod.torch as hvd

        return hvd

    def gather_bytes(self, message: np.ndarray, name: str, process_set: Any) -> np.ndarray:  # noqa: D102
        self.module()
        try:
            return gather(torch.from_numpy(message), name, process_set).numpy()
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"Horovod could not gather {message.size} bytes ({name}): {error}") from error


def gather(tensor: torch.Tensor, name: str, process_set: Any) -> torch.Tensor:
    """The members' tensors of one type joined along their first dimension, in rank order. Collective, blocking.

    Raises:
        RuntimeError: Horovod failed, or was shut down meanwhile.
        ValueError: as RuntimeError.
    """
    from horovod.torch import mpi_ops

    joined = tensor.new()
    holders = hold(tensor), hold(joined)
    try:
        # What hvd.allgather_async does, with a result of ours.
        return mpi_ops.synchronize(mpi_ops._allgather_async(tensor, joined, name, process_set))
    finally:
        del holders


HOROVOD = TorchHorovod()
import_horovod = HOROVOD.module
member_set = HOROVOD.member_set
gather_values = HOROVOD.gather_values


def has_begun(optimizer: Any) -> bool:
    """Whether a backward pass has run for a step that ``optimizer``, a Horovod optimizer, has not finished."""
    passes = optimizer.backward_passes_per_step
    return bool(optimizer._handles) or any(left != passes for left in optimizer._allreduce_delay.values())


def is_idle(optimizer: Any) -> bool:
    """Whether no backward pass has run since the latest step of ``optimizer``; False where it is not Horovod's."""
    return hasattr(optimizer, "_allreduce_delay") and not has_begun(optimizer)


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
