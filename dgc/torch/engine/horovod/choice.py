"""Which library joins the ranks of a torch job: the one that the user names, or the best that all ranks can use."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from dgc.core.transport import Transport
from dgc.errors import ConfigError
from dgc.torch.engine.distributed import DistributedTransport, ProcessGroup
from dgc.torch.engine.horovod.device_sums import SummedOnDevices
from dgc.torch.engine.horovod.horovod import HOROVOD
from dgc.torch.engine.horovod.transport import HorovodTransport
from dgc.transport.agreement import tell_error
from dgc.transport.choice import require_no_choice


def make_transport(choice: str | Transport = "auto", process_set: Any = None) -> Transport:
    """Make the transport for a group of ranks. Collective over the ranks of ``process_set``.

    Where Horovod has NCCL, it is one that large sums of GPUs' gradients do not travel over.

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


def horovod_of_all_ranks(process_set: Any, group: Any) -> ModuleType:
    """Horovod, which averages dense gradients, on all ranks. Collective over the ranks that will exchange.

    Raises:
        ConfigError: it is missing or not initialised, or another rank has a compressor.
    """
    try:
        hvd = HOROVOD.module()
    except ConfigError as missing:
        error = ConfigError(
            "without a compressor of dgc's gradients are averaged by Horovod; give every rank the same compression= "
            f"or, for dense training under torch.distributed, use DistributedDataParallel: {missing}"
        )
        if only_torch_distributed() and ProcessGroup(group).included():
            transport = DistributedTransport(group)
            tell_error(transport, error)
            transport.close()
        raise error from missing
    members = HOROVOD.chosen_set(process_set)
    if members.process_set_id is not None and members.included() and members.size() > 1:
        require_no_choice(hvd.rank(), members, HOROVOD.gather_values)
    return hvd


def only_torch_distributed() -> bool:
    """Whether torch.distributed is initialised and Horovod is not."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    hvd = sys.modules.get("horovod.torch")
    return hvd is None or not hvd.is_initialized()
