"""Horovod's own collectives as a transport: works wherever Horovod does (MPI, Gloo, with or without NCCL)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dgc.errors import TransportError
from dgc.torch.engine.horovod.horovod import HOROVOD, import_horovod, member_set
from dgc.transport.horovod import HorovodTransportBase


class HorovodTransport(HorovodTransportBase):
    """Collectives of ``horovod.torch`` on CPU tensors that share memory with the caller's arrays.

    Tensor names are explicit, equal on all ranks and repeat from step to step, so that Horovod's response cache knows
    them; they contain the size, since another first dimension under the same name would miss that cache. One call takes
    about 2 ms on MPI, of which Horovod's cycle time and its 1 ms polling are the most.

    Horovod may fuse a large sum with other tensors that travel at the same time, so its last bits can differ between
    two runs, though never between ranks.
    """

    def __init__(self, process_set: Any = None, name_prefix: str = "dgc") -> None:
        """Agree on names. Collective over the ranks of ``process_set``.

        Args:
            process_set: a ``hvd.ProcessSet``, or None for all ranks.
            name_prefix: begins all tensor names; shows up in Horovod's timeline and stall warnings.

        Raises:
            ConfigError: Horovod is not ready, or this process is not in ``process_set``.
            TransportError: Horovod's collective failed.
        """
        self._hvd = import_horovod()
        self._process_set = member_set(process_set)
        super().__init__(self._process_set.rank(), self._process_set.size())
        self._prefix = HOROVOD.unique_name(f"{name_prefix}.transport", self._process_set)

    def _gather(self, message: np.ndarray) -> np.ndarray:
        # torch warns about memory it may not write, though nothing writes here.
        tensor = torch.from_numpy(message if message.flags.writeable else message.copy())
        return self._run(self._hvd.allgather_async, tensor, f"allgather.{message.size}").numpy()

    def _sum(self, array: np.ndarray) -> None:
        kind = f"allreduce.{array.dtype.name}.{array.size}"
        self._run(self._hvd.allreduce_async_, torch.from_numpy(array), kind, op=self._hvd.Sum)

    def _is_running(self) -> bool:
        return self._hvd.is_initialized()

    def _run(self, start: Callable[..., Any], tensor: torch.Tensor, kind: str, **options: Any) -> torch.Tensor:
        name = f"{self._prefix}.{kind}"
        try:
            return self._hvd.synchronize(start(tensor, name=name, process_set=self._process_set, **options))
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"Horovod's collective {name} failed: {error}") from error
