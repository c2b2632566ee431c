"""What becomes of a step between ``synchronize()`` and ``step()``: applied, carried on in ``.grad``, or dropped."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch

from dgc.core.exchange.exchange import Exchange
from dgc.errors import ConfigError
from dgc.torch.engine.step.callers import frames, stepping
from dgc.torch.engine.tensors import places, samples, spread


class Carried(Enum):
    """Whether the results of a step that was not applied are exchanged again with what a backward pass adds to them."""

    NO = "no"
    PERHAPS = "perhaps"  # they may have been set to 0 in place before gradients were added
    YES = "yes"
    AGAIN = "again"  # the step was applied, and they were not cleared after it


@dataclass(frozen=True)
class _Left:
    """A gradient as a step left it."""

    gradient: weakref.ref[torch.Tensor]
    version: int
    values: torch.Tensor

    def is_still(self, gradient: torch.Tensor | None) -> bool:
        """Whether nobody has changed or cleared it; writing to ``.data`` raises no version."""
        seen: Any = self.gradient()
        if gradient is None or gradient is not seen or seen._version != self.version:
            return False
        return torch.equal(spread(seen), self.values) and bool(seen.any())


class LastStep:
    """Learns whether the latest step was applied, and takes it back if its gradients were dropped instead.

    A step counts as applied once an optimizer over any of its parameters begins to step. Gradients count as dropped
    when the owner's ``zero_grad()`` has run, or when the next step finds other or cleared gradients; otherwise what was
    exchanged is still in ``.grad``, and will be exchanged again with what is added there.

    Attributes:
        stands: whether the owner's ``zero_grad()`` has not cleared the latest step's results.
        mixed: whether gradients of the latest step were added to an earlier one's results, which hold momentum or decay
            that the compressor applies.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], exchange: Callable[[], Exchange]) -> None:
        """Take the parameters, and a function that returns the exchange that is in use."""
        self._parameters = parameters
        self._exchange = exchange
        self._gradients: dict[int, torch.Tensor] = {}  # of two parameters, by index
        self._left: dict[int, _Left] = {}  # of two parameters, by index, after a step that was applied
        self._values: list[np.ndarray] | None = None
        self._versions: list[int] = []
        self._places: list[torch.Tensor] = []
        self._seen_stepping = False
        self._warned = self._told = False
        self.stands = self.mixed = False

    @property
    def is_open(self) -> bool:
        """Whether the latest step can still be taken back."""
        return self._exchange().undecided

    def concluded(self) -> None:
        """The exchange has finished a step, which was not applied yet."""
        self.stands = True
        if not self._exchange().undecided:
            self._forget()
            return
        self._gradients = {i: gradient for i, (gradient, _) in self._at_both_ends().items()}
        if not self._seen_stepping:
            # Somebody who never calls step() updates the parameters without an optimizer.
            self._versions = [p._version for p in self._parameters]
            # Nearly all of a sparse result is 0: one place of each parameter is where an update changes it most.
            self._places = [places(p, p.grad) for p in self._parameters]
            self._values = list(map(samples, self._parameters, self._places))

    def applied(self) -> None:
        """An optimizer steps the parameters now, or has done so since a closure exchanged their gradients."""
        exchange = self._exchange()
        if exchange.undecided:
            self._seen_stepping = True
            exchange.applied()
        if self.mixed and not self._told:
            self._told = True
            warnings.warn(_AGAIN, RuntimeWarning, stacklevel=4)
        self._forget()

    def stepped(self) -> None:
        """An optimizer has stepped the parameters; the next step looks whether what it leaves was cleared."""
        ends = self._at_both_ends().items()
        self._left = {i: _Left(weakref.ref(gradient), gradient._version, values) for i, (gradient, values) in ends}

    def cleared(self) -> None:
        """The owner's ``zero_grad()`` has run."""
        self.stands = False
        if not self._exchange().undecided:
            return
        if any(map(stepping, frames())):  # in a closure, which may run several times in one step
            self.applied()
        else:
            self._drop()

    def next_begins(self, index: int | None = None, first_pass: bool = False) -> Carried:
        """The first gradient of the next step is there.

        Args:
            index: the parameter whose gradient that is; None if no backward pass has touched any.
            first_pass: whether the other gradients are as they were before this backward pass.

        Returns:
            Whether the latest step's results are still in ``.grad``, where they are exchanged again.
        """
        left, self._left = self._left, {}
        if not self._exchange().undecided:
            kept = (each.is_still(self._parameters[i].grad) for i, each in left.items() if i != index)
            return Carried.AGAIN if first_pass and any(kept) else Carried.NO
        others = {i: gradient for i, gradient in self._gradients.items() if i != index}
        if self._were_cleared(others or self._gradients):
            self._drop()
            return Carried.NO
        unknown = not self._gradients or self._changed()
        self._exchange().applied()
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
        taken = self._exchange().drop()
        self._forget()
        return taken

    def _drop(self) -> None:
        exchange = self._exchange()
        if self._changed():
            exchange.applied()
        elif exchange.drop() and not exchange.config.discardable and not self._warned:
            self._warned = True
            warnings.warn(
                "a step was exchanged by synchronize() but not applied by step(); its gradient stays in the "
                "compressor's residuals and is applied later, where dense training drops it: give the compressor "
                "discardable=True to have it dropped",
                RuntimeWarning,
                stacklevel=4,
            )
        self._forget()

    def _at_both_ends(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Of the first and the last parameter that has a gradient, by index: that, and values from all over it."""
        count = len(self._parameters)
        ends = (self._first_with_values(order) for order in (range(count), reversed(range(count))))
        return {i: (gradient, values) for i, gradient, values in filter(None, ends)}

    def _first_with_values(self, order: Iterable[int]) -> tuple[int, torch.Tensor, torch.Tensor] | None:
        """If possible of one that is not 0, as those of unused parameters are; a device is not waited for."""
        first = None
        for i in itertools.islice(filter(self._has_gradient, order), _TRIED):
            gradient: Any = self._parameters[i].grad
            found = i, gradient, spread(gradient)
            if not gradient.is_cpu or found[2].any():
                return found
            first = first or found
        return first

    def _has_gradient(self, index: int) -> bool:
        gradient = self._parameters[index].grad
        return gradient is not None and not gradient.is_sparse and gradient.numel() > 0

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
        now = map(samples, self._parameters, self._places)
        return not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(self._values, now, strict=True))

    def _forget(self) -> None:
        self._gradients = {}
        self._values = None


_TRIED = 16
"""Gradients that are looked through from either end for one that is not 0."""

_AGAIN = (
    "call optimizer.zero_grad() between steps, also between two step() of one backward(): .grad still held what the "
    "last step() applied, with the momentum and weight decay that the compressor applies, which cannot be taken for a "
    "gradient. With momentum=0 in the compressor both stay in the optimizer"
)


def refuse_results(carried: Carried, *, idle: bool, velocity: bool, unwritten: bool) -> None:
    """Results of the latest step would be taken for gradients, or those that dense training takes again are not there.

    Args:
        carried: whether results are still in ``.grad``.
        idle: whether no backward pass has run since.
        velocity: whether they hold momentum or decay that the compressor applies.
        unwritten: whether they were applied without being written.

    Raises:
        ConfigError: they certainly would be.
    """
    if carried is Carried.AGAIN and not (idle and any(map(stepping, frames()))):
        return  # who does not step may drop them again; a warning comes with the step
    if carried is Carried.AGAIN and velocity:
        raise ConfigError(_AGAIN)
    if carried is Carried.AGAIN and unwritten:
        raise ConfigError(
            "call optimizer.zero_grad() between two step() of one backward(), or give the compressor "
            "sparse_updates=False: the last one has applied its results without writing them to .grad, where dense "
            "training finds and applies them again"
        )
    if not velocity:
        return
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
