"""Horovod for torch, or an error that says how to get it; and small questions to all ranks."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch

from dgc.adapter.horovod import Horovod
from dgc.errors import TransportError
from dgc.torch.engine.horovod.held import hold
from dgc.transport.choice import ProcessSet


class TorchHorovod(Horovod):
    """Horovod for torch."""

    framework = "PyTorch"
    module_name = "horovod.torch"
    package = "dgc.torch"

    def load(self) -> ModuleType:  # noqa: D102
        import horovod.torch as hvd

        return hvd

    def gather_bytes(self, message: np.ndarray, name: str, process_set: ProcessSet | None) -> np.ndarray:  # noqa: D102
        self.module()
        try:
            return gather(torch.from_numpy(message), name, process_set).numpy()
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"Horovod could not gather {message.size} bytes ({name}): {error}") from error


def gather(tensor: torch.Tensor, name: str, process_set: ProcessSet | None) -> torch.Tensor:
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
