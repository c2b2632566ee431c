"""Momentum, Nesterov and weight decay of a ``torch.optim.SGD``, applied by the compressor in the optimizer's place.

The user's optimizer line stays as it is, and so do its groups: the compressor reads them at the beginning of every
step, so that a scheduler, a loaded state or a value set by hand is followed. While the optimizer updates the
parameters they hold 0, so that nothing is applied twice. A ``momentum_buffer`` becomes the compressor's u.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dgc.adapter.compression import warn_of_first_moment
from dgc.core.config import DGCConfig
from dgc.core.exchange.records import Hyper
from dgc.errors import ConfigError

Absorb = Callable[[int, torch.Tensor], None]

_LEFT = (
    "{0} has a step() of its own: its momentum stays in it, so that the step sees gradients as in dense training, and "
    "the compressor does plain error feedback. If the step leaves gradients and momentum to torch.optim.SGD, momentum "
    "correction is to be had with momentum=0 and weight_decay=0 in {0}, and both in the compressor"
)
_DECAY_LEFT = (
    "{0} has a step() of its own, so its weight decay stays in it, outside of the momentum that the compressor "
    "applies: it is weaker than in torch.optim.SGD, a tenth at momentum 0.9. Give weight_decay= to the compressor, and "
    "0 to {0}"
)
_KNOWN_STEPS = ("torch", "horovod", "dgc")
"""Packages whose steps of SGD and of what wraps it are known to do nothing else with gradients."""

_VARIANTS = {"dampening": "set dampening=0", "maximize": "minimise the negative loss"}
_READ = ("momentum", "weight_decay", "nesterov", *_VARIANTS)

Members = list[tuple[torch.Tensor, int]]
"""Parameters of a group that the compressor has, each with its index."""


class Adoption:
    """Momentum SGD's options of each parameter, and the optimizer they are taken from.

    Attributes:
        hyper: the options by parameter index, as the core uses them.
        active: whether momentum is taken from the optimizer.
        options: names of the group options that the compressor applies.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        optimizer: torch.optim.Optimizer | None,
        config: DGCConfig,
        absorb: Absorb,
    ) -> None:
        """Read what the optimizer's groups hold now; they are not changed.

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
        plain = is_sgd(optimizer) and not has_own_step(optimizer)
        self.active = plain and config.momentum is None
        # Decay belongs inside the momentum: it is adopted wherever the compressor corrects momentum.
        decay = plain and config.weight_decay is None and (self.active or bool(config.momentum))
        self.options = (("momentum", "nesterov") if self.active else ()) + (("weight_decay",) if decay else ())
        self._adopted: set[int] = set()
        self._members: dict[int, tuple[list[int], Members]] = {}  # id of a list: what was in it, what of it is ours
        self._seen: list[float] = []  # of the groups' options, when they were read
        self._hidden: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # id of a group: the group, its own values
        if optimizer is not None:
            self.read(optimizer)
            if is_sgd(optimizer) and not plain:
                name, groups = _updating_class(optimizer).__name__, optimizer.param_groups
                if any(group.get("momentum") for group in groups):
                    warnings.warn(_LEFT.format(name), RuntimeWarning, stacklevel=2)
                elif config.momentum and any(group.get("weight_decay") for group in groups):
                    warnings.warn(_DECAY_LEFT.format(name), RuntimeWarning, stacklevel=2)
            self._warn_of_first_moment(optimizer)

    def _warn_of_first_moment(self, optimizer: torch.optim.Optimizer) -> None:
        for group, _ in self._groups(optimizer):
            betas = group.get("betas")
            if isinstance(betas, (tuple, list)) and betas and betas[0]:
                rest = ", ".join(map(str, ("0.0", *betas[1:])))
                name = _updating_class(optimizer).__name__
                warn_of_first_moment(name, betas[0], self._config.momentum, f"betas=({rest})")
                return

    def read(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow what the optimizer's groups hold.

        Args:
            optimizer: the optimizer that steps the parameters (of Horovod's, at first the one it is built from).

        Raises:
            ConfigError: as in the constructor.
        """
        groups, seen = self._groups(optimizer), [float(is_sgd(optimizer))]
        for group, _ in groups:
            for option in _READ:
                seen.append(float(group.get(option) or 0))  # a comprehension is another call
        if self._hidden or seen != self._seen:
            self._seen = []
            for group, ours in groups:
                self._read_group(group, ours, bool(seen[0]))
            self._seen = [] if self._hidden else seen

    @property
    def has_velocity(self) -> bool:
        """Whether results hold momentum or decay that the compressor applies."""
        return any(self.hyper.momentum) or any(self.hyper.weight_decay)

    def took_from(self, index: int) -> bool:
        """Whether momentum or weight decay of this parameter was adopted from an optimizer."""
        return index in self._adopted and bool(self.hyper.momentum[index] or self.hyper.weight_decay[index])

    def index_of(self, parameter: torch.Tensor) -> int | None:
        """The parameter's index in the layout, or None."""
        return self._index.get(id(parameter))

    # -- around the optimizer's update ---------------------------------------------------------------------------

    def hide(self, optimizer: torch.optim.Optimizer, options: Sequence[str] | None = None) -> None:
        """Let the groups hold 0 until :meth:`show`, so that the optimizer does not apply what the compressor does.

        Args:
            optimizer: that is about to update the parameters.
            options: names of those to hide; all that were adopted if None.
        """
        for group, _ in self._groups(optimizer):
            _, own = self._hidden.setdefault(id(group), (group, {}))
            for option in self.options if options is None else options:
                if option in self.options and group.get(option):
                    own[option] = group[option]
                    group[option] = False if option == "nesterov" else 0

    @property
    def hides(self) -> bool:
        """Whether groups hold 0 now."""
        return bool(self._hidden)

    def show(self) -> None:
        """Give the groups back what :meth:`hide` took; what was set in them meanwhile stays."""
        hidden, self._hidden = self._hidden, {}
        for group, own in hidden.values():
            for option, value in own.items():
                if not group.get(option):
                    group[option] = value

    def refuse_second(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse momentum or decay of another optimizer than the one it was taken from.

        Raises:
            ConfigError: it would be applied twice.
        """
        for group, ours in self._groups(optimizer):
            for option in self.options:
                if group.get(option) and any(self.took_from(i) for _, i in ours):
                    raise ConfigError(
                        f"{option} would be applied twice: the compressor has that of the optimizer which was bound, "
                        f"and another one steps with {option}={group[option]}; bind the optimizer that steps the model"
                    )

    # -- the optimizer's state -----------------------------------------------------------------------------------

    def absorb(self, optimizer: torch.optim.Optimizer, *, zeros: bool) -> bool:
        """Turn the optimizer's momentum buffers into u, and take them out of its state.

        Args:
            optimizer: the owner of the parameters.
            zeros: whether buffers that are all zero count as well. ``hvd.broadcast_optimizer_state`` makes such buffers
                where there were none.

        Returns:
            Whether buffers that are not all zero became u.
        """
        if not self.active or not optimizer.state:
            return False
        found = {}
        for _, ours in self._groups(optimizer):
            for p, i in ours:
                buffer = optimizer.state.get(p, {}).pop("momentum_buffer", None)
                if buffer is not None:
                    found[i] = buffer
        self.drop_empty(optimizer)
        moves = any(bool(buffer.any()) for buffer in found.values())
        if moves or zeros:
            for i, buffer in found.items():
                self._absorb(i, buffer)
        return moves

    def drop_empty(self, optimizer: torch.optim.Optimizer) -> None:
        """Delete entries of the optimizer's state in which nothing is left: Horovod takes them for a state."""
        if not optimizer.state:
            return
        for _, ours in self._groups(optimizer):
            for p, _ in ours:
                if p in optimizer.state and is_empty(optimizer.state[p]):
                    del optimizer.state[p]

    # -- inside --------------------------------------------------------------------------------------------------

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], Members]]:
        """Those with parameters of the compressor, which are looked up again only in a list that has changed."""
        groups = []
        for group in optimizer.param_groups:
            parameters = group["params"]
            ids = list(map(id, parameters))
            known = self._members.get(id(parameters))
            if known is None or known[0] != ids:
                known = ids, [(p, self._index[id(p)]) for p in parameters if id(p) in self._index]
                self._members[id(parameters)] = known
                self._seen = []
            if known[1]:
                groups.append((group, known[1]))
        return groups

    def _own(self, group: dict[str, Any], option: str) -> float:
        """A group's own value of an option, hidden or not."""
        _, hidden = self._hidden.get(id(group), (group, {}))
        return float(group.get(option) or hidden.get(option) or 0)

    def _read_group(self, group: dict[str, Any], ours: Members, sgd: bool) -> None:
        name, config, hyper = self._names[ours[0][1]], self._config, self.hyper
        momentum, decay = self._own(group, "momentum"), self._own(group, "weight_decay")
        if momentum and config.momentum:
            raise ConfigError(
                f"momentum would be applied twice to {name!r}: the compressor has momentum={config.momentum} and the "
                f"optimizer has momentum={momentum}; leave momentum out of the compressor (it adopts the optimizer's), "
                "or set the optimizer's to 0"
            )
        if decay and config.weight_decay:
            raise ConfigError(
                f"weight decay would be applied twice to {name!r}: the compressor has "
                f"weight_decay={config.weight_decay} and the optimizer has {decay}; leave one of them out"
            )
        if not sgd:
            return
        for option, advice in _VARIANTS.items():
            if self.active and group.get(option):
                raise ConfigError(
                    f"the optimizer has {option}={group[option]}, which momentum correction cannot take over; "
                    f"{advice}, or pass momentum=0 to the compressor to leave momentum in the optimizer"
                )
        for _, i in ours:
            if self.active:
                hyper.momentum[i] = momentum
                if config.nesterov is None:
                    hyper.nesterov[i] = bool(self._own(group, "nesterov"))
            if "weight_decay" in self.options:
                hyper.weight_decay[i] = decay
        if any(self._own(group, option) for option in self.options):
            self._adopted.update(i for _, i in ours)


def is_sgd(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether it is a ``torch.optim.SGD``, or shards one (``ZeroRedundancyOptimizer``)."""
    return issubclass(_updating_class(optimizer), torch.optim.SGD)


def has_own_step(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether a user's subclass has a ``step()``, which may do anything with gradients before it updates.

    So may ``_init_group()``, which collects them.
    """
    steps = (vars(cls).get(name) for cls in _updating_class(optimizer).__mro__ for name in ("step", "_init_group"))
    modules = (str(getattr(step, "__module__", None)) for step in steps if step is not None)
    return any(module.partition(".")[0] not in _KNOWN_STEPS for module in modules)


def _updating_class(optimizer: torch.optim.Optimizer | None) -> type:
    sharded = getattr(optimizer, "optimizer_class", None)
    return sharded if isinstance(sharded, type) else type(optimizer)


def is_empty(entry: object) -> bool:
    """Whether an entry of an optimizer's state holds nothing."""
    return isinstance(entry, dict) and all(value is None for value in entry.values())
