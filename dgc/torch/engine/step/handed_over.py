"""Gradients between ``backward()`` and the end of their exchange, in which nobody may change them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dgc.errors import LayoutError
from dgc.torch.engine.step.scaler import has_unscaled, steps_by_scaler

_CHANGED = (
    "the gradient of {!r} was changed or replaced while it was exchanged, which begins in backward(): call "
    "optimizer.synchronize() first, then clip or unscale, then step() inside optimizer.skip_synchronize(); register a "
    "hook that changes gradients before the optimizer is wrapped"
)


class HandedOver:
    """Gradients whose exchange has begun, by index, each with its version then.

    Whether the exchange has read a gradient before or after a change of it is a matter of chance.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        """Begin with none."""
        self._names, self._parameters = names, parameters
        self._gradients: dict[int, tuple[torch.Tensor, int]] = {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._gradients)

    def add(self, index: int) -> None:
        """The gradient of a parameter was handed over."""
        gradient = self._parameters[index].grad
        assert gradient is not None, "it was"
        self._gradients[index] = gradient, gradient._version

    def clear(self) -> None:
        """The exchange is over."""
        self._gradients.clear()

    def changed(self, scaler: object, optimizer: torch.optim.Optimizer) -> tuple[LayoutError, int] | None:
        """What is wrong with the first gradient that is not what it was, and its index.

        Args:
            scaler: known to the compressor, which may have divided gradients, and leaves their versions as they are.
            optimizer: the owner of the gradients.
        """
        if self._gradients and has_unscaled(scaler, optimizer):
            return self._first_changed()
        for i, p in enumerate(self._parameters):
            if p.grad is None:
                return LayoutError(f"the gradient of {self._names[i]!r} was cleared while it was exchanged"), i
            gradient, version = self._gradients.get(i, (p.grad, p.grad._version))
            if p.grad is not gradient or (gradient._version != version and not _shares_memory(gradient)):
                return LayoutError(_CHANGED.format(self._names[i])), i
        return None

    def changed_by_scaler(self) -> tuple[LayoutError, int] | None:
        """The same in a ``step()`` that a GradScaler calls: it has divided gradients by its scale, with no new version.

        Its own ``step()`` does so first where ``unscale_()`` has not.
        """
        if not self._gradients or not steps_by_scaler():
            return None
        return self._first_changed()

    def _first_changed(self) -> tuple[LayoutError, int]:
        first = next(iter(self._gradients))
        return LayoutError(_CHANGED.format(self._names[first])), first


def _shares_memory(gradient: torch.Tensor) -> bool:
    """Whether it may be a part of a buffer, whose other parts have the same version."""
    return not gradient.is_sparse and gradient.untyped_storage().nbytes() > gradient.nbytes
