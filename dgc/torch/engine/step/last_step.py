"""What becomes of a step between ``synchronize()`` and ``step()``: applied, carried on in ``.grad``, or dropped."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import numpy as np
import torch

from dgc.core.exchange.exchange import Exchange
from dgc.errors import ConfigError
from dgc.torch.engine.step.callers import frames, stepping
from dgc.torch.engine.tensors import samples


class Carried(Enum):
    """Whether the results of a step that was not applied are exchanged again with what a backward pass adds to them."""

    NO = "no"
    PERHAPS = "perhaps"  # they may have been set to 0 in place before gradients were added
    YES = "yes"


class LastStep:
    """Learns whether the latest step was applied, and takes it back if its gradients were dropped instead.

    A step counts as applied once an optimizer over any of its parameters begins to step. Gradients count as dropped
    when the owner's ``zero_grad()`` has run, or when the next step finds other or cleared gradients; otherwise what was
    exchanged is still in ``.grad``, and will be exchanged again with what is added there.

    Attributes:
        stands: whether the owner's ``zero_grad()`` has not cleared the latest step's results.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], exchange: Callable[[], Exchange]) -> None:
        """Take the parameters, and a function that returns the exchange that is in use."""
        self._parameters = parameters
        self._exchange = exchange
        self._gradients: dict[int, torch.Tensor] = {}  # of two parameters, by index
        self._values: list[np.ndarray] | None = None
        self._versions: list[int] = []
        self._seen_stepping = False
        self._warned = False
        self.stands = False

    @property
    def is_open(self) -> bool:
        """Whether the latest step can still be taken back."""
        return self._exchange().unapplied.pending

    def concluded(self) -> None:
        """The exchange has finished a step, which was not applied yet."""
        self.stands = True
        if not self._exchange().unapplied.pending:
            self._forget()
            return
        count = len(self._parameters)
        ends = [next(filter(self._has_gradient, order), None) for order in (range(count), reversed(range(count)))]
        self._gradients = {i: self._parameters[i].grad for i in ends if i is not None}
        if not self._seen_stepping:
            # Somebody who never calls step() updates the parameters without an optimizer.
            self._versions = [p._version for p in self._parameters]
            self._values = [samples(p) for p in self._parameters]

    def applied(self) -> None:
        """An optimizer steps the parameters now, or has done so since a closure exchanged their gradients."""
        unapplied = self._exchange().unapplied
        if unapplied.pending:
            self._seen_stepping = True
            unapplied.settle()
        self._forget()

    def cleared(self) -> None:
        """The owner's ``zero_grad()`` has run."""
        self.stands = False
        if not self._exchange().unapplied.pending:
            return
        if any(map(stepping, frames())):  # in a closure, which may run several times in one step
            self.applied()
        else:
            self._drop()

    def next_begins(self, index: int | None = None, first_pass: bool = False) -> Carried:
        """The first gradient of the next step is there.

        Args:
            index: the parameter whose gradient that is.
            first_pass: whether the other gradients are as they were before this backward pass.

        Returns:
            Whether the latest step's results are still in ``.grad``, where they are exchanged again.
        """
        if not self._exchange().unapplied.pending:
            return Carried.NO
        others = {i: gradient for i, gradient in self._gradients.items() if i != index}
        if self._were_cleared(others or self._gradients):
            self._drop()
            return Carried.NO
        unknown = not self._gradients or self._changed()
        self._exchange().unapplied.settle()
        self._forget()
        if unknown:
            return Carried.NO
        return Carried.YES if others and first_pass else Carried.PERHAPS

    def discard(self) -> bool:
        """Take the step back because the user says so.

        Returns:
            False when there is nothing to take back.

        Raises:
            LayoutError: in the middle of a step.
        """
        self._exchange().require_between_steps("discard_step()")
        taken = self._exchange().unapplied.take_back()
        self._forget()
        return taken

    def _drop(self) -> None:
        unapplied = self._exchange().unapplied
        if self._changed():
            unapplied.settle()
        elif unapplied.take_back() and not unapplied.exact and not self._warned:
            self._warned = True
            warnings.warn(
                "a step was exchanged by synchronize() but not applied by step(); its gradient stays in the "
                "compressor's residuals and is applied later, where dense training drops it: give the compressor "
                "discardable=True to have it dropped",
                RuntimeWarning,
                stacklevel=4,
            )
        self._forget()

    def _has_gradient(self, index: int) -> bool:
        gradient = self._parameters[index].grad
        return gradient is not None and not gradient.is_sparse

    def _were_cleared(self, gradients: Mapping[int, torch.Tensor]) -> bool:
        """Whether one of the gradients that were kept in mind is gone, or all have been set to 0."""
        gone = any(self._parameters[i].grad is not gradient for i, gradient in gradients.items())
        return gone or (bool(gradients) and not any(bool(gradient.any()) for gradient in gradients.values()))

    def _changed(self) -> bool:
        """Whether somebody else has updated the parameters; only asked until an optimizer was seen stepping them."""
        if self._values is None:
            return False
        if self._versions != [p._version for p in self._parameters]:
            return True
        now = [samples(p) for p in self._parameters]
        return not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(self._values, now, strict=True))

    def _forget(self) -> None:
        self._gradients = {}
        self._values = None


def refuse_velocity(carried: Carried) -> None:
    """Gradients are added to results that hold momentum or decay, which would be taken for a gradient.

    Raises:
        ConfigError: they certainly are.
    """
    advice = (
        "backward() ran after synchronize() without step() or zero_grad(): .grad holds the step's result, with the "
        "momentum and weight decay that the compressor applies, and cannot take in another gradient; accumulate with "
        "backward_passes_per_step, clear the gradients in between with optimizer.zero_grad(), or leave both in the "
        "optimizer: momentum=0 in the compressor"
    )
    if carried is Carried.YES:
        raise ConfigError(advice)
    if carried is Carried.PERHAPS:
        warnings.warn(f"unless gradients were set to 0 in place: {advice}", RuntimeWarning, stacklevel=2)
