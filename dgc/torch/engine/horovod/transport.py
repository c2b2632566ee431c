"""Horovod's own collectives as a transport: works wherever Horovod does (MPI, Gloo, with or without NCCL)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from dgc.errors import TransportError
from dgc.torch.engine.horovod.held import hold
from dgc.torch.engine.horovod.horovod import HOROVOD, gather, import_horovod, member_set
from dgc.transport.choice import ProcessSet
from dgc.transport.horovod import HorovodTransportBase


class HorovodTransport(HorovodTransportBase):
    """Collectives of ``horovod.torch`` on CPU tensors that share memory with the caller's arrays.

    Tensor names are explicit, equal on all ranks and repeat from step to step, so that Horovod's response cache knows
    them; they contain the size, since another first dimension under the same name would miss that cache. One call takes
    about 2 ms on MPI, of which Horovod's cycle time and its 1 ms polling are the most.

    Horovod may fuse a large sum with other tensors that are sent at the same time, so its last bits can differ between
    two runs, though never between ranks.
    """

    def __init__(self, process_set: ProcessSet | None = None, name_prefix: str = "dgc") -> None:
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
        return self._run(lambda name: gather(tensor, name, self._process_set), f"allgather.{message.size}").numpy()

    def _sum(self, array: np.ndarray) -> None:
        tensor = torch.from_numpy(array)
        holder = hold(tensor)

        def reduce(name: str) -> torch.Tensor:
            op, members = self._hvd.Sum, self._process_set
            return self._hvd.synchronize(self._hvd.allreduce_async_(tensor, name=name, op=op, process_set=members))

        self._run(reduce, f"allreduce.{array.dtype.name}.{array.size}")
        del holder

    def _is_running(self) -> bool:
        return self._hvd.is_initialized()

    def _run(self, collective: Callable[[str], torch.Tensor], kind: str) -> torch.Tensor:
        name = f"{self._prefix}.{kind}"
        try:
            return collective(name)
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"Horovod's collective {name} failed: {error}") from error
