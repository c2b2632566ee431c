"""What becomes of a step's results in ``.grad``: applied by ``step()``, dropped, or exchanged once more."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from dgc.core.exchange.exchange import Exchange
from dgc.errors import ConfigError
from dgc.torch.engine.tensors import local, places, samples, scattered_values


class Carried(Enum):
    """Whether the latest step's results are exchanged again with what a backward pass adds to them."""

    NO = "no"
    PERHAPS = "perhaps"  # they may have been set to 0 in place before gradients were added
    YES = "yes"
    AGAIN = "again"  # the step was applied, and they were not cleared after it


@dataclass(frozen=True)
class _Left:
    """A gradient as an applied step left it."""

    gradient: weakref.ref[torch.Tensor]
    version: int
    values: torch.Tensor

    def is_still(self, gradient: torch.Tensor | None) -> bool:
        """Whether it was neither changed nor cleared; writing to ``.data`` raises no version."""
        seen = self.gradient()
        if gradient is None or seen is None or gradient is not seen or seen._version != self.version:
            return False
        return torch.equal(scattered_values(seen), self.values) and bool(local(seen).any())


class Results:
    """The latest step's results in ``.grad``, and whether the step was applied or dropped.

    A step is applied once an optimizer over any of its parameters begins to step. It is dropped when none of its
    results is in ``.grad`` any more without that. Otherwise they are exchanged again with what is added to them.

    Attributes:
        mixed: whether gradients of the latest step were added to an applied step's results, which hold momentum or
            decay that the compressor applies.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], exchange: Callable[[], Exchange], in_closure: Callable[[], bool]
    ) -> None:
        """Begin without any.

        Args:
            parameters: that are compressed.
            exchange: returns the exchange that is in use.
            in_closure: whether a closure of the optimizer's step runs, which may be evaluated several times in a step.
        """
        self._parameters = parameters
        self._exchange = exchange
        self._in_closure = in_closure
        self._written: list[weakref.ref[torch.Tensor] | None] = []  # gradients by index, while they stand
        self._left: dict[int, _Left] = {}  # of two parameters, by index, after a step that was applied
        self._values: list[np.ndarray] | None = None
        self._versions: list[int] = []
        self._places: list[torch.Tensor] = []
        self._seen_stepping = False
        self._warned_of_drop = self._warned_of_mix = self.mixed = False

    @property
    def undecided(self) -> bool:
        """Whether the latest step can still be dropped."""
        return self._exchange().latest.undecided

    @property
    def stand(self) -> bool:
        """Whether any of the latest step's results is still in ``.grad``."""
        written = zip(self._written, self._parameters, strict=False)
        return any(ref is not None and p.grad is not None and p.grad is ref() for ref, p in written)

    def written(self) -> None:
        """The exchange has finished a step, which was not applied yet."""
        self._written = [None if p.grad is None or p.grad.is_sparse else weakref.ref(p.grad) for p in self._parameters]
        self._values = None
        if self.undecided and not self._seen_stepping:
            # A script that never calls step() updates the parameters without an optimizer.
            self._versions = [p._version for p in self._parameters]
            # Nearly all of a sparse result is 0: one place of each parameter is where an update changes it most.
            self._places = [places(p, p.grad) for p in self._parameters]
            self._values = list(map(samples, self._parameters, self._places))

    def applied(self) -> None:
        """An optimizer steps the parameters now, or has done so since a closure exchanged their gradients."""
        if self.undecided:
            self._seen_stepping = True
            self._exchange().applied()
        if self.mixed and not self._warned_of_mix:
            self._warned_of_mix = True
            warnings.warn(_AGAIN, RuntimeWarning, stacklevel=4)

    def stepped(self) -> None:
        """An optimizer has stepped the parameters; the next step looks whether what it leaves was cleared."""
        count = len(self._parameters)
        ends = (self._first_with_values(order) for order in (range(count), reversed(range(count))))
        self._left = dict(filter(None, ends))

    def cleared(self) -> None:
        """The owner's ``zero_grad()`` has run: whatever is in ``.grad`` from now on is no result."""
        self._written = []

    def moved(self, index: int) -> None:
        """DDP may have moved gradients to new buckets: what was not cleared is in ``.grad``, as another tensor.

        Args:
            index: the parameter whose gradient of the next step is there.
        """
        for i, p in enumerate(self._parameters):
            if i == index or p.grad is None:
                continue
            if i < len(self._written) and self._written[i] is not None:
                self._written[i] = weakref.ref(p.grad)
            if i in self._left:
                self._left[i] = _Left(weakref.ref(p.grad), p.grad._version, self._left[i].values)

    def drop_if_cleared(self) -> None:
        """Before the state is looked at: drop the latest step if its results were cleared."""
        if self.undecided and not self.stand:
            self._conclude()

    def discard(self) -> bool:
        """Take the step back because the user says so.

        Returns:
            False when there is nothing to take back.

        Raises:
            LayoutError: in the middle of a step.
        """
        self._exchange().require_between_steps("discard_step()")
        self.drop_if_cleared()
        return self._exchange().drop()

    def next_begins(self, index: int | None = None, first_pass: bool = False) -> Carried:
        """The first gradient of the next step is there.

        Args:
            index: the parameter whose gradient that is; None if no backward pass has touched any.
            first_pass: whether the other gradients are as they were before this backward pass.

        Returns:
            Whether the latest step's results are still in ``.grad``, where they are exchanged again.
        """
        carried = self._carried(index, first_pass)
        self._left, self._written = {}, []
        return carried

    # -- inside --------------------------------------------------------------------------------------------------

    def _carried(self, index: int | None, first_pass: bool) -> Carried:
        if not self.undecided:
            kept = (each.is_still(self._parameters[i].grad) for i, each in self._left.items() if i != index)
            return Carried.AGAIN if first_pass and any(kept) else Carried.NO
        there = {
            i: gradient
            for i, ref in enumerate(self._written)
            if ref is not None and (gradient := ref()) is not None and gradient is self._parameters[i].grad
        }
        others = [gradient for i, gradient in there.items() if i != index]
        known = bool(others) or index is None
        if not there or (known and not any(bool(local(gradient).any()) for gradient in others)):
            self._conclude()
            return Carried.NO
        if self._were_updated():
            self._exchange().applied()
            return Carried.NO
        self._exchange().applied()
        return Carried.YES if others and first_pass else Carried.PERHAPS

    def _conclude(self) -> None:
        """The results are gone without a step: applied by hand or in a closure, or dropped."""
        exchange = self._exchange()
        if self._in_closure() or self._were_updated():
            exchange.applied()
        elif exchange.drop() and not exchange.config.discardable and not self._warned_of_drop:
            self._warned_of_drop = True
            warnings.warn(
                "a step was exchanged by synchronize() but not applied by step(); its gradient stays in the "
                "compressor's residuals and is applied later, where dense training drops it: give the compressor "
                "discardable=True to have it dropped",
                RuntimeWarning,
                stacklevel=4,
            )

    def _were_updated(self) -> bool:
        """Whether the script has updated the parameters; only asked until an optimizer was seen stepping them."""
        if self._values is None:
            return False
        if self._versions != [p._version for p in self._parameters]:
            return True
        now = map(samples, self._parameters, self._places)
        return not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(self._values, now, strict=True))

    def _first_with_values(self, order: Iterable[int]) -> tuple[int, _Left] | None:
        """If possible of one that is not 0, as those of unused parameters are; a device is not waited for."""
        first = None
        for i in itertools.islice(filter(self._has_gradient, order), _TRIED):
            gradient = self._parameters[i].grad
            assert gradient is not None, "it has one"
            found = i, _Left(weakref.ref(gradient), gradient._version, scattered_values(gradient))
            if not gradient.is_cpu or found[1].values.any():
                return found
            first = first or found
        return first

    def _has_gradient(self, index: int) -> bool:
        gradient = self._parameters[index].grad
        return gradient is not None and not gradient.is_sparse and local(gradient).numel() > 0


_TRIED = 16
"""Gradients that are looked through from either end for one that is not 0."""

_AGAIN = (
    "call optimizer.zero_grad() between steps, also between two step() of one backward(): .grad still held what the "
    "last step() applied, with the momentum and weight decay that the compressor applies, which cannot be taken for a "
    "gradient. With momentum=0 in the compressor both stay in the optimizer"
)


def refuse_results(carried: Carried, *, stepping: bool, velocity: bool, unwritten: bool) -> None:
    """Results of the latest step would be taken for gradients, or those that dense training takes again are not there.

    Args:
        carried: whether results are still in ``.grad``.
        stepping: whether ``step()`` runs, and no backward pass has run since the latest step.
        velocity: whether they hold momentum or decay that the compressor applies.
        unwritten: whether they were applied without being written.

    Raises:
        ConfigError: they certainly would be.
    """
    if carried is Carried.AGAIN:
        if not stepping:
            return  # gradients that are not stepped may be dropped again; a warning comes with the step
        if velocity:
            raise ConfigError(_AGAIN)
        if unwritten:
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
