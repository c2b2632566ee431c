"""Do all ranks hold the same parameters, and the same results of a step? Asked with a few values of each tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dgc.core.transport import Transport
from dgc.torch.engine.tensors import fingerprint, samples
from dgc.transport.agreement import require_replicas


def require_same_parameters(transport: Transport, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
    """After the first exchange, and the first after a state was loaded; before the update. Collective.

    Raises:
        ConfigError: the ranks train different models.
    """
    require_replicas(
        transport,
        {n: samples(p) for n, p in zip(names, parameters, strict=True)},
        "before the first step, and after loading a checkpoint on one rank, call "
        "hvd.broadcast_optimizer_state(optimizer, root_rank=0), in which some optimizers move parameters, and then "
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0); without Horovod load the optimizer's state on "
        "every rank, and call dgc.torch.broadcast_parameters(model.state_dict())",
    )


def require_same_results(transport: Transport, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
    """Before results are handed back by another ``synchronize()``. Collective.

    Raises:
        ConfigError: the ranks changed them in different ways.
    """
    dense = [None if p.grad is None or p.grad.is_sparse else p.grad for p in parameters]
    require_replicas(
        transport,
        # A gradient that was taken out of the step counts as 0, which another rank may have put there already.
        {
            n: fingerprint(torch.zeros_like(p) if g is None else g)
            for n, p, g in zip(names, parameters, dense, strict=True)
        },
        "their gradients were changed in different ways between synchronize() and another synchronize() or step(), "
        "which averages nothing again: make the same change on every rank",
    )
