"""Which transport a torch job uses: the one that the user names, or the best that all ranks can use."""

from __future__ import annotations

from typing import Any

from dgc.core.transport import Collectives, Transport
from dgc.torch.engine.horovod.device_sums import SummedOnDevices
from dgc.torch.engine.horovod.horovod import HOROVOD
from dgc.torch.engine.horovod.transport import HorovodTransport


def make_transport(choice: str | Collectives = "auto", process_set: Any = None) -> Transport:
    """Make the transport for a group of ranks. Collective over the ranks of ``process_set``.

    Where Horovod has NCCL, it is one that large sums of GPUs' gradients are not sent over.

    Args:
        choice: "auto", "mpi", "horovod" or a transport: see :func:`dgc.transport.choice.choose_transport`.
        process_set: a ``hvd.ProcessSet``, or None for all ranks.

    Raises:
        ConfigError: unknown or differing choices, Horovod is not ready, or this process is not in ``process_set``.
        TransportError: "mpi" was asked for and some rank cannot use it.
    """
    made = HOROVOD.make_transport(choice, process_set, HorovodTransport)
    if not isinstance(choice, str) or not HOROVOD.module().nccl_built():
        return made
    return SummedOnDevices(made, HOROVOD.module(), HOROVOD.member_set(process_set))
