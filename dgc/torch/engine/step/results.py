"""What becomes of a step's results in ``.grad``: applied by ``step()``, dropped, or exchanged once more."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
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
        kept: whether the step that began last found gradients where the one before had left them, also cleared in
            place; None where that had left none.
        in_closure: whether a closure of the optimizer's step runs, which may be evaluated several times in a step.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], exchanges: Sequence[Exchange]) -> None:
        """Begin without any.

        Args:
            parameters: that are compressed.
            exchanges: the one that is in use, which is replaced here by another.
        """
        self._parameters = parameters
        self._exchanges = exchanges
        self._written: list[weakref.ref[torch.Tensor] | None] = []  # the latest step's gradients by index
        self._left: dict[int, _Left] = {}  # of two parameters, by index, after a step that was applied
        self._values: list[np.ndarray] | None = None
        self._versions: list[int] = []
        self._places: list[torch.Tensor] = []
        self._cleared = self._seen_stepping = self._warned_of_drop = self._warned_of_mix = False
        self.mixed = self.in_closure = False
        self.kept: bool | None = None

    @property
    def undecided(self) -> bool:
        """Whether the latest step can still be dropped."""
        return self._exchanges[0].latest.undecided

    @property
    def stand(self) -> bool:
        """Whether any of the latest step's results is still in ``.grad``."""
        return not self._cleared and bool(self._there())

    def written(self) -> None:
        """The exchange has finished a step, which was not applied yet."""
        self._written, self._values, self._cleared = [], None, False
        for p in self._parameters:
            self._written.append(None if p.grad is None or p.grad.is_sparse else weakref.ref(p.grad))
        if not self._seen_stepping and self.undecided:
            # A script that never calls step() updates the parameters without an optimizer.
            self._versions = [p._version for p in self._parameters]
            # Nearly all of a sparse result is 0: one place of each parameter is where an update changes it most.
            self._places = [places(p, p.grad) for p in self._parameters]
            self._values = list(map(samples, self._parameters, self._places))

    def applied(self) -> None:
        """An optimizer steps the parameters now, or has done so since a closure exchanged their gradients."""
        if self.undecided:
            self._seen_stepping = True
            self._exchanges[0].applied()
        if self.mixed and not self._warned_of_mix:
            self._warned_of_mix = True
            warnings.warn(_AGAIN, RuntimeWarning, stacklevel=4)

    def stepped(self) -> None:
        """An optimizer has stepped the parameters; the next step looks whether what it leaves was cleared.

        Of the first and the last gradient, if possible ones that are not 0, as those of unused parameters are.
        """
        self._left = {}
        for order in (range(len(self._parameters)), reversed(range(len(self._parameters)))):
            tried: list[tuple[int, _Left]] = []
            for i in order:
                gradient = self._parameters[i].grad
                if gradient is None or gradient.is_sparse or not (values := scattered_values(gradient)).numel():
                    continue
                tried.append((i, _Left(weakref.ref(gradient), gradient._version, values)))
                if not gradient.is_cpu or values.any():  # a device is not waited for
                    tried = tried[-1:]
                    break
                if len(tried) == _TRIED:
                    break
            self._left.update(tried[:1])

    def cleared(self) -> None:
        """The owner's ``zero_grad()`` has run: whatever is in ``.grad`` from now on is no result."""
        self._cleared = True

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

    def next_begins(self, index: int | None = None, first_pass: bool = False) -> Carried:
        """The first gradient of the next step is there.

        Args:
            index: the parameter whose gradient that is; None if no backward pass has touched any.
            first_pass: whether the other gradients are as they were before this backward pass.

        Returns:
            Whether the latest step's results are still in ``.grad``, where they are exchanged again.
        """
        there = self._there()
        self.kept = bool(there) if any(self._written) else None
        carried = self._carried({} if self._cleared else there, index, first_pass)
        self._left, self._written = {}, []
        return carried

    # -- inside --------------------------------------------------------------------------------------------------

    def _there(self) -> dict[int, torch.Tensor]:
        """By index, the latest step's gradients that are where they were."""
        there = {}
        for i, ref in enumerate(self._written):
            if ref is not None and (gradient := self._parameters[i].grad) is not None and gradient is ref():
                there[i] = gradient
        return there

    def _carried(self, there: dict[int, torch.Tensor], index: int | None, first_pass: bool) -> Carried:
        if not self.undecided:
            for i, left in self._left.items() if first_pass else ():
                if i != index and left.is_still(self._parameters[i].grad):
                    return Carried.AGAIN
            return Carried.NO
        others = [gradient for i, gradient in there.items() if i != index]
        known = bool(others) or index is None
        if not there or (known and not any(bool(local(gradient).any()) for gradient in others)):
            self._conclude()
            return Carried.NO
        updated = self._were_updated()
        self._exchanges[0].applied()
        if updated:
            return Carried.NO
        return Carried.YES if others and first_pass else Carried.PERHAPS

    def _conclude(self) -> None:
        """The results are gone without a step: applied by hand or in a closure, or dropped."""
        exchange = self._exchanges[0]
        if self.in_closure or self._were_updated():
            exchange.applied()
        elif exchange.drop() and not self._warned_of_drop:
            self._warned_of_drop = True
            warnings.warn(
                "a step was exchanged by synchronize() but not applied by step(); its gradient stays in the "
                "compressor's residuals and is applied later, where dense training drops it",
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
