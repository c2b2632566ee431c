"""Parameters whose gradients are sparse tensors: their entries are gathered as they are, beside the exchange.

Which ones they are shows in the first step. Until then a zero stands in for each of their gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from dgc.core.exchange.exchange import Exchange
from dgc.core.transport import Transport
from dgc.errors import ConfigError, LayoutError


class SparseGradients:
    """Which of a model's parameters have sparse gradients.

    Attributes:
        found: their indices.
        agreed: whether all ranks have agreed on them.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor], op: str = "average") -> None:
        """Begin with none.

        Args:
            names: of the parameters.
            parameters: in registration order.
            op: "average" or "sum".
        """
        self._names, self._parameters, self._op = names, parameters, op
        self.found: set[int] = set()
        self.agreed = False

    @property
    def names(self) -> list[str]:
        """Names of those with sparse gradients, in registration order."""
        return [self._names[i] for i in sorted(self.found)]

    def dense_refusal(self, index: int) -> LayoutError:
        """What is wrong with a dense gradient of a known parameter: it may go unused in a step, but not change."""
        return LayoutError(
            f"{self._names[index]!r} had sparse gradients and now has a dense one; build a new compressor when a "
            "parameter changes the way it is used"
        )

    def late_refusal(self, index: int) -> LayoutError:
        """What is wrong with a sparse gradient of an exchanged parameter, once the ranks agreed on them."""
        return LayoutError(
            f"{self._names[index]!r} has a sparse gradient, but had none in the first step on any rank; use it in the "
            "first step, or give sparse_as_dense=True to dgc.torch.DistributedOptimizer"
        )

    def momentum_refusal(self, index: int) -> ConfigError:
        """What is wrong with a sparse gradient whose momentum was adopted: it would not be applied."""
        return ConfigError(
            f"{self._names[index]!r} has sparse gradients, which are sent Horovod's own way, but momentum or weight "
            "decay of its group was taken into the compressor; put it in a parameter group of its own with momentum 0 "
            "and weight_decay 0"
        )

    def join(self, transport: Transport) -> None:
        """Replace this rank's sparse gradients by all ranks' average or sum. Collective where there are any."""
        for index in sorted(self.found):
            p = self._parameters[index]
            own = p.grad if p.grad is not None and p.grad.is_sparse else torch.zeros_like(p).to_sparse(1)
            own = own.coalesce()
            places = [i.view(own.indices().shape[0], -1) for i in _gather(transport, own.indices())]
            values = torch.cat([v.view(-1, *own.values().shape[1:]) for v in _gather(transport, own.values())])
            if self._op == "average":
                values /= transport.size
            joined = torch.sparse_coo_tensor(torch.cat(places, 1), values, p.shape, device=p.device).coalesce()
            if p.grad is not None and p.grad.is_sparse:
                p.grad.zero_().add_(joined)
            else:
                p.grad = joined

    def agree(self, transport: Transport, submitted: Collection[int]) -> set[int]:
        """Once, after the first step: those that have a sparse gradient on any rank. Collective.

        Args:
            transport: connects the ranks.
            submitted: indices of those that were exchanged, whose sparse gradients were made dense before.

        Raises:
            LayoutError: all have one.
        """
        sparse = [p.grad is not None and p.grad.is_sparse for p in self._parameters]
        mask = np.array([s and i not in submitted for i, s in enumerate(sparse)], np.float32)
        transport.allreduce(mask, "max")
        if mask.all():
            raise LayoutError(
                "all gradients of this optimizer are sparse, so that none is compressed: wrap it with "
                "hvd.DistributedOptimizer, or give sparse_as_dense=True to dgc.torch.DistributedOptimizer"
            )
        self.agreed = True
        return {int(i) for i in np.flatnonzero(mask)}


def _gather(transport: Transport, values: torch.Tensor) -> list[torch.Tensor]:
    """All ranks' tensors of one type, flat and of different lengths, in rank order. Collective."""
    own = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    sizes = np.empty((transport.size, 8), np.uint8)
    transport.allgather(np.array([own.size], np.int64).view(np.uint8), sizes)
    lengths = sizes.view(np.int64)[:, 0]
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: own.size] = own
    out = np.empty((transport.size, padded.size), np.uint8)
    transport.allgather(padded, out)
    parts = (torch.from_numpy(row[:n].copy()) for row, n in zip(out, lengths, strict=True))
    return [part.view(values.dtype) if part.numel() else part.to(values.dtype) for part in parts]


def carry_over(before: Exchange, after: Exchange, kept: Collection[str]) -> None:
    """Move the state of an exchange to one that has fewer parameters: now, and before an unapplied step."""
    states = [before.state_dict()]
    if before.drop():
        states.insert(0, before.state.to_dict())
    for place, state in enumerate(states):
        state["parameters"] = {n: s for n, s in state["parameters"].items() if n in kept}
        if len(state["parameters"]) == len(kept):
            if place:
                after.latest.remember()
            after.state.load(state, after.config.own_share(after.transport.size))
