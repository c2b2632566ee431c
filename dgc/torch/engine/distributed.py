"""torch.distributed beside Horovod: the ranks of a process group, and their collectives as a transport."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dgc.errors import ConfigError, TransportError
from dgc.transport.horovod import HorovodTransportBase

_TIMEOUT = datetime.timedelta(seconds=600)
"""Longest wait for another rank in a collective."""


class ProcessGroup:
    """The ranks of a ``torch.distributed`` process group, with the members that a compressor asks Horovod for."""

    process_set_id = None

    def __init__(self, group: Any = None) -> None:
        """Take a group, or all ranks if None.

        Raises:
            ConfigError: torch.distributed is missing or not initialised.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError("call torch.distributed.init_process_group() before a compressor is bound")
        self.group = group

    def included(self) -> bool:
        """Whether this process is in the group."""
        return self.group is not dist.GroupMember.NON_GROUP_MEMBER and dist.get_rank(self.group) >= 0

    def rank(self) -> int:
        """This process' rank in the group."""
        return dist.get_rank(self.group)

    def size(self) -> int:
        """Number of ranks in the group."""
        return dist.get_world_size(self.group)

    # -- as dgc.adapter.horovod.Horovod has it ---------------------------------------------------------------------

    def require_ready(self) -> None:
        """The constructor has checked that."""

    def chosen_set(self, own: object = None, other: object = None) -> ProcessGroup:
        """This group; a Horovod process set beside it is an error.

        Raises:
            ConfigError: one is given.
        """
        if (own or other) not in (None, self):
            raise ConfigError("process_set= is Horovod's; give a torch.distributed process group as group=")
        return self

    def member_set(self, process_set: Any = None) -> ProcessGroup:
        """The group itself."""
        return self

    def op_name(self, op: object) -> str:
        """The name of a reduce op, as the core calls it.

        Raises:
            ConfigError: neither average nor sum.
        """
        names = {dist.ReduceOp.AVG: "average", dist.ReduceOp.SUM: "sum"}
        name = op.lower() if isinstance(op, str) else next((n for o, n in names.items() if o == op), "")
        if name not in names.values():
            raise ConfigError(f'op is {op!r}; gradient compression supports "average" and "sum"')
        return name


class DistributedTransport(HorovodTransportBase):
    """Collectives of a Gloo group of its own, so that DDP, FSDP and the script share no group with the exchange."""

    name = "torch.distributed"
    shut_down = "torch.distributed is shut down: stop exchanging before destroy_process_group()"

    def __init__(self, group: Any = None) -> None:
        """Make the group. Collective over the ranks of ``group``, all ranks if None."""
        ranks = dist.get_process_group_ranks(group)
        only_members = len(ranks) < dist.get_world_size()
        self._group = dist.new_group(
            ranks, _TIMEOUT, backend="gloo", use_local_synchronization=only_members, group_desc="dgc"
        )
        super().__init__(dist.get_rank(self._group), len(ranks))

    def _gather(self, message: np.ndarray) -> np.ndarray:
        own = torch.from_numpy(message if message.flags.writeable else message.copy())
        out = torch.empty(self.size * message.size, dtype=torch.uint8)
        self._run(lambda: _all_gather(out, own, group=self._group))
        return out.numpy()

    def _sum(self, array: np.ndarray) -> None:
        self._run(lambda: dist.all_reduce(torch.from_numpy(array), group=self._group))

    def _is_running(self) -> bool:
        return dist.is_initialized()

    def _run(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"a collective of torch.distributed failed: {error}") from error

    def close(self) -> None:
        """End the group of its own; the others go on."""
        if not self._closed and dist.is_initialized():
            dist.destroy_process_group(self._group)
        super().close()


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


def broadcast_parameters(
    parameters: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]], root_rank: int = 0, group: Any = None
) -> None:
    """Overwrite tensors on all ranks with those of one rank, by torch.distributed. Collective over ``group``.

    Args:
        parameters: ``model.state_dict()``, which holds buffers as well, or (name, tensor) pairs.
        root_rank: global rank whose values are sent.
        group: a process group; all ranks if None.

    Raises:
        ConfigError: torch.distributed is not initialised.
    """
    ProcessGroup(group)
    items = parameters.items() if isinstance(parameters, Mapping) else parameters
    for _, tensor in items:
        if isinstance(tensor, torch.Tensor):
            dist.broadcast(tensor.detach(), root_rank, group=group)
