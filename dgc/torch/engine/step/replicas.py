"""What keeps the replicas alike: parameters and results that are compared, options that joined ranks take over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dgc.core.exchange.records import StepContext
from dgc.core.transport import Transport
from dgc.torch.engine.adoption import Adoption
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


def share_options(
    transport: Transport,
    context: StepContext,
    adoption: Adoption,
    optimizer: torch.optim.Optimizer,
    updates: bool,
) -> bool:
    """Give ranks that have joined the options of one that trains. Collective.

    Args:
        transport: connects the ranks.
        context: of the step, whose messages are in.
        adoption: of the optimizer's options.
        optimizer: steps the parameters.
        updates: whether the update follows, and nothing of the script's comes before it.

    Returns:
        ``updates`` of a rank that trains.
    """
    hidden = adoption.hides  # Horovod's optimizer exchanges within step()
    adoption.show()
    own = np.array([updates, *option_values(optimizer)], np.float64)
    rows = np.empty((transport.size, own.nbytes), np.uint8)
    transport.allgather(own.view(np.uint8), rows)
    came = rows[min(set(range(transport.size)) - set(context.joined))].view(np.float64)
    if transport.rank in context.joined:
        set_option_values(optimizer, came[1:])
        adoption.read(optimizer)
        context.hyper = adoption.hyper.chosen(range(len(adoption.hyper.momentum)))
    if hidden:
        adoption.hide(optimizer)
    return bool(came[0])


def option_values(optimizer: torch.optim.Optimizer) -> list[float]:
    """The numbers among all groups' options, in a fixed order; NaN in the place of anything else."""
    return [
        float(v) if isinstance(v, (int, float, torch.Tensor)) else float("nan")
        for group in optimizer.param_groups
        for name in optimizer.defaults
        for v in _as_tuple(group[name])
    ]


def set_option_values(optimizer: torch.optim.Optimizer, values: Sequence[float]) -> None:
    """Overwrite the numbers among all groups' options by what :func:`option_values` returned on another rank."""
    left = iter(values)
    for group in optimizer.param_groups:
        for name in optimizer.defaults:
            options = tuple(_of_type(v, next(left)) for v in _as_tuple(group[name]))
            group[name] = options if isinstance(group[name], tuple) else options[0]


def _as_tuple(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _of_type(own: object, came: float) -> object:
    if isinstance(own, torch.Tensor):
        return own.fill_(came)
    if not isinstance(own, (int, float)):
        return own
    return type(own)(came) if isinstance(own, bool) or came.is_integer() else came
