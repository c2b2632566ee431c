"""Taking momentum, Nesterov and weight decay out of a ``torch.optim.SGD`` into the compressor.

The user's optimizer line stays as it is, and nothing is applied twice.

What is taken can come back: schedulers set momentum, a dense checkpoint restores all of it. Whatever reappears is
taken again at the beginning of a step; its ``momentum_buffer`` becomes the compressor's u.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dgc.core.config.config import DGCConfig
from dgc.core.exchange.records import Hyper
from dgc.errors import ConfigError

_TAKEN = ("momentum", "nesterov", "weight_decay")

Absorb = Callable[[int, torch.Tensor], None]


class Adoption:
    """Momentum SGD's options of each parameter, and the watch over the optimizer they were taken from.

    Attributes:
        hyper: the options by parameter index, as the core uses them.
        active: whether anything is taken from the optimizer at all.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        optimizer: torch.optim.Optimizer | None,
        config: DGCConfig,
        absorb: Absorb,
    ) -> None:
        """Take over what the optimizer's groups hold now.

        Args:
            parameters: the compressed tensors.
            names: their names, for errors.
            optimizer: the user's optimizer or None.
            config: ``momentum``, ``nesterov`` and ``weight_decay`` that are not None are used instead of adopting.
            absorb: called with (parameter index, momentum_buffer) for each buffer found.

        Raises:
            ConfigError: momentum or weight decay both given and in the optimizer, dampening, or ``maximize=True``.
        """
        self._index = {id(p): i for i, p in enumerate(parameters)}
        self._names = names
        self._config = config
        self._absorb = absorb
        self.hyper = Hyper.uniform(len(parameters), config)
        self.active = _is_sgd(optimizer) and config.momentum is None
        # Decay belongs inside the momentum: it is adopted wherever the compressor corrects momentum.
        self._decay = _is_sgd(optimizer) and config.weight_decay is None and (self.active or bool(config.momentum))
        self._taken_from: set[int] = set()
        self._lent = False
        self._before = [] if optimizer is None else [(group, dict(group)) for group in optimizer.param_groups]
        if optimizer is not None:
            try:
                # Its buffers stay: Horovod builds the optimizer that will step from the groups, and drops the state.
                self.take(optimizer, buffers=False)
            except ConfigError:
                self.undo()
                raise

    def undo(self) -> None:
        """Give the optimizer back what was taken at construction; for a construction that failed."""
        for group, before in self._before:
            for option in _TAKEN:
                if option in before:
                    group[option] = before[option]

    def take(self, optimizer: torch.optim.Optimizer, *, buffers: bool = True) -> None:
        """Move what the optimizer's groups hold into ``hyper``; nothing happens when there is nothing.

        Args:
            optimizer: the optimizer that steps the parameters (in way A, at first the one it is built from).
            buffers: whether momentum buffers become u.

        Raises:
            ConfigError: as in the constructor.
        """
        if self._lent:
            # The buffers that a borrowed momentum made are zero unless the root's checkpoint was broadcast into them.
            found = [s["momentum_buffer"] for s in optimizer.state.values() if s.get("momentum_buffer") is not None]
            if not any(bool(b.any()) for b in found):
                for state in optimizer.state.values():
                    state.pop("momentum_buffer", None)
            self._lent = False
        for group in optimizer.param_groups:
            ours = [(p, self._index[id(p)]) for p in group["params"] if id(p) in self._index]
            if ours:
                self._take_group(optimizer, group, ours, buffers)

    def took_from(self, index: int) -> bool:
        """Whether momentum or weight decay of this parameter was adopted from an optimizer."""
        return index in self._taken_from and bool(self.hyper.momentum[index] or self.hyper.weight_decay[index])

    def lend_momentum(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the adopted momentum back into the groups; the next :meth:`take` fetches it again."""
        self._lent = True
        for group in optimizer.param_groups:
            for p in group["params"]:
                i = self._index.get(id(p))
                if i in self._taken_from:
                    group["momentum"] = self.hyper.momentum[i]
                    group["nesterov"] = self.hyper.nesterov[i]
                    break

    def restored(self, groups: Iterable[dict[str, Any]], indices: Sequence[Sequence[int | None]]) -> None:
        """Write the adopted options back into a state dict's ``param_groups``, as a dense run would have saved them."""
        for group, members in zip(groups, indices, strict=True):
            taken = [i for i in members if i in self._taken_from]
            if taken:
                i = taken[0]
                assert i is not None
                if self.active:
                    group["momentum"] = self.hyper.momentum[i]
                    group["nesterov"] = self.hyper.nesterov[i]
                if self._decay:
                    group["weight_decay"] = self.hyper.weight_decay[i]

    def index_of(self, parameter: torch.Tensor) -> int | None:
        """The parameter's index in the layout, or None."""
        return self._index.get(id(parameter))

    def _take_group(
        self,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        ours: list[tuple[torch.Tensor, int]],
        buffers: bool,
    ) -> None:
        momentum, decay = _number(group.get("momentum", 0)), _number(group.get("weight_decay", 0))
        if not self.active:
            self._refuse_doubles(momentum, decay, ours)
        if not _is_sgd(optimizer) or not (self.active or self._decay):
            return
        if not self.active:
            self._take_decay(group, decay, ours)
            return
        if group.get("dampening"):
            raise ConfigError(
                f"the optimizer has dampening={group['dampening']}, which momentum correction cannot take over; set "
                "dampening=0, or pass momentum=0 to the compressor to leave momentum in the optimizer"
            )
        if group.get("maximize"):
            raise ConfigError(
                "the optimizer has maximize=True, which momentum correction cannot take over; minimise the negative "
                "loss, or pass momentum=0 to the compressor to leave momentum in the optimizer"
            )
        for p, i in ours:
            if momentum:
                self.hyper.momentum[i] = momentum
                if self._config.nesterov is None:
                    self.hyper.nesterov[i] = bool(group.get("nesterov")) or self.hyper.nesterov[i]
                self._taken_from.add(i)
            state = optimizer.state.get(p) if buffers else None
            if state and state.get("momentum_buffer") is not None:
                self._absorb(i, state.pop("momentum_buffer"))
                if not state:
                    del optimizer.state[p]
        group["momentum"], group["nesterov"] = 0, False
        if self._decay:
            self._take_decay(group, decay, ours)

    def _take_decay(self, group: dict[str, Any], decay: float, ours: list[tuple[torch.Tensor, int]]) -> None:
        for _, i in ours:
            if decay:
                self.hyper.weight_decay[i] = decay
                self._taken_from.add(i)
        group["weight_decay"] = 0

    def _refuse_doubles(self, momentum: float, decay: float, ours: list[tuple[torch.Tensor, int]]) -> None:
        name = self._names[ours[0][1]]
        if momentum and self._config.momentum:
            raise ConfigError(
                f"momentum would be applied twice to {name!r}: the compressor has momentum={self._config.momentum} and "
                f"the optimizer has momentum={momentum}; leave momentum out of the compressor (it adopts the "
                "optimizer's), or set the optimizer's to 0"
            )
        if decay and self._config.weight_decay:
            raise ConfigError(
                f"weight decay would be applied twice to {name!r}: the compressor has "
                f"weight_decay={self._config.weight_decay} and the optimizer has {decay}; leave one of them out"
            )


def _is_sgd(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether it is a ``torch.optim.SGD``, or shards one (``ZeroRedundancyOptimizer``)."""
    updating = getattr(optimizer, "optimizer_class", type(optimizer))
    return isinstance(updating, type) and issubclass(updating, torch.optim.SGD)


def _number(value: Any) -> float:
    return float(value) if value is not None else 0.0
