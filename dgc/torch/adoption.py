"""Adopt SGD's momentum and decay, or the first moment of Adam-like optimizers: the compressor applies them instead.

The script builds its optimizer as before. The compressor reads the groups at the beginning of every step, so it follows
a scheduler, a loaded state or a value set by hand. While the optimizer updates the parameters, the groups hold 0, so
that nothing is applied twice. SGD's ``momentum_buffer`` becomes the compressor's u.

Adam's second moment must see gradients, not their running mean. ``beta1`` is therefore adopted in the first step that
selects entries; in the steps before, Adam applies it itself. ``exp_avg`` then becomes u, with its bias corrected. See
:mod:`dgc.core.config`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from dgc.adapter.checks import warn_of_first_moment
from dgc.core.config import NO_MEMORY, DGCConfig, bias_correction, is_settled, running_mean
from dgc.core.exchange.exchange import Exchange
from dgc.core.exchange.step import Hyper
from dgc.errors import ConfigError
from dgc.torch.tensors import as_array, local

# Optimizers that keep a running mean of gradients, ``exp_avg``, and divide it by another running mean.
_MOMENTS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)

# Others whose steps are not proportional to gradients. Muon came with torch 2.9.
_OTHERS = ("Adagrad", "Adadelta", "RMSprop", "Adafactor", "Muon")

_LEFT = (
    "{0} has a step() of its own: its momentum stays in it, so that the step sees gradients as in dense training, and "
    "the compressor does plain error feedback. If the step leaves gradients and momentum to torch.optim.SGD, momentum "
    "correction needs momentum=0 and weight_decay=0 in {0}, and both in the compressor"
)
_MOMENT_LEFT = (
    "{0} has a step() of its own: its first moment stays in it, so that the step sees gradients as in dense training, "
    "and the compressor does plain error feedback, which learns more slowly. If the step leaves gradients to Adam's, "
    "set beta1 to 0 in {0} and give the compressor momentum=beta1"
)
_DECAY_LEFT = (
    "{0} has a step() of its own, so its weight decay stays in it, outside of the momentum that the compressor "
    "applies: it is weaker than in torch.optim.SGD, a tenth at momentum 0.9. Give weight_decay= to the compressor, and "
    "0 to {0}"
)
# Packages whose optimizers' step() is known not to change gradients.
_KNOWN_STEPS = ("torch", "horovod", "dgc")

_VARIANTS = {"dampening": "set dampening=0", "maximize": "minimise the negative loss"}
_READ = ("momentum", "weight_decay", "nesterov", *_VARIANTS)

# The parameters of a group that the compressor exchanges, each with its index.
Members = list[tuple[torch.Tensor, int]]


class Adoption:
    """Holds the options that the compressor applies to each parameter, and the optimizer that they come from.

    Attributes:
        index: the index of each parameter in the layout, by the parameter's ``id()``.
        hyper: the options by parameter index, as the core uses them.
        active: whether momentum, or the first moment, is taken from the optimizer.
        options: names of the group options that the compressor applies.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        optimizer: torch.optim.Optimizer | None,
        config: DGCConfig,
        exchange: Exchange,
    ) -> None:
        """Read the optimizer's groups, and change nothing in them.

        Options of ``config`` that are not None replace the optimizer's. The momentum goes into the u of ``exchange``.
        If ``exchange`` selects no entries of a group, the group keeps its beta1.

        Raises:
            ConfigError: momentum or weight decay is set in ``config`` and in the optimizer, or the optimizer has
                dampening or ``maximize=True``.
        """
        self.index = {id(p): i for i, p in enumerate(parameters)}
        self._names = names
        self._config = config
        self._exchange = exchange
        self._sparsified = {i for i in range(len(parameters)) if exchange.layout.is_sparsified(i)}
        self.hyper = Hyper.uniform(len(parameters), config)
        plain = not _has_own_step(optimizer)
        self._averages = plain and config.momentum is None and _has_moments(optimizer)
        self.active = self._averages or (plain and config.momentum is None and _is_sgd(optimizer))
        # SGD adds its decay before the momentum, so the decay is adopted wherever the compressor corrects momentum.
        adopts_decay = plain and _is_sgd(optimizer) and (self.active or bool(config.momentum))
        own = ("betas",) if self._averages else ("momentum", "nesterov") if self.active else ()
        decay = ("weight_decay",) if adopts_decay and config.weight_decay is None else ()
        self.options: tuple[str, ...] = (*own, *decay)
        self._adopted: set[int] = set()  # parameters with an option that is adopted, or will be
        self._members: dict[int, tuple[list[int], Members]] = {}  # by id of a group's list: its ids, and our members
        self._seen: list[float] = []  # the values of the groups' options when they were last read
        self._hidden: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # id of a group: the group, its own values
        self._settled: dict[int, float] = {}  # id of a group: the beta1 whose bias correction is 1 by now
        self._step = 0
        self._steps: int | None = None  # the number of steps since the first selection; None before it
        if optimizer is not None:
            self.read(optimizer)
            name, groups = updating_class(optimizer).__name__, optimizer.param_groups
            if _has_moments(optimizer) and not plain and config.momentum is None:
                if any(group["betas"][0] for group in groups):
                    warnings.warn(_MOMENT_LEFT.format(name), RuntimeWarning, stacklevel=2)
            elif _is_sgd(optimizer) and not plain:
                if any(group.get("momentum") for group in groups):
                    warnings.warn(_LEFT.format(name), RuntimeWarning, stacklevel=2)
                elif config.momentum and any(group.get("weight_decay") for group in groups):
                    warnings.warn(_DECAY_LEFT.format(name), RuntimeWarning, stacklevel=2)
            betas = [group.get("betas") for group, _ in self._groups(optimizer)]
            first = next((b[0] for b in betas if isinstance(b, (tuple, list)) and b and b[0]), None)
            if first is not None:
                warn_of_first_moment(name, first, config.momentum)

    def read(self, optimizer: torch.optim.Optimizer, step: int | None = None, *, anew: bool = False) -> None:
        """Read the options of the optimizer's groups, which must not be hidden. Raises the constructor's errors.

        Args:
            optimizer: the optimizer that steps the parameters.
            step: the number of the step that begins. None at construction, when no first moment is adopted yet.
            anew: whether a state was loaded into the optimizer or the compressor since the last step.
        """
        if anew:
            self._settled.clear()
        first, self._step = self._exchange.selects_from, step or 0
        self._steps = None if step is None or first is None or step < first else step - first
        groups, sgd = self._groups(optimizer), _is_sgd(optimizer)
        if self._averages and _has_moments(optimizer):
            self._read_moments(optimizer, groups)
        seen = [float(sgd)]
        for group, _ in groups:
            for option in _READ:
                seen.append(float(group.get(option) or 0))  # a comprehension would cost another call
        if seen != self._seen:
            self._seen = []  # in case the next line raises
            for group, ours in groups:
                self._read_group(group, ours, sgd)
            self._seen = seen

    @property
    def has_velocity(self) -> bool:
        """Whether results contain momentum or decay that the compressor applied."""
        return max(self.hyper.momentum, default=0.0) > NO_MEMORY or any(self.hyper.weight_decay)

    # -- around the optimizer's update ---------------------------------------------------------------------------

    def hide(self, optimizer: torch.optim.Optimizer, options: Sequence[str] | None = None) -> None:
        """Set adopted options to 0 in the groups until :meth:`show`, so that the optimizer does not apply them, too.

        ``options`` names the options to hide; None hides all adopted ones.
        """
        for group, ours in self._groups(optimizer):
            _, own = self._hidden.setdefault(id(group), (group, {}))
            for option in self.options if options is None else options:
                if option not in self.options or not group.get(option):
                    continue
                if option != "betas":
                    own[option] = group[option]
                    group[option] = False if option == "nesterov" else 0
                elif self._has_moment(ours) and group[option][0]:
                    own[option] = group[option]
                    group[option] = self._without_first(group[option])

    @property
    def hides(self) -> bool:
        """Whether the groups hold 0 now."""
        return bool(self._hidden)

    @contextlib.contextmanager
    def shown(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Show the user's options in the groups inside the ``with`` block, if they are hidden now."""
        hidden = self.hides
        self.show()
        try:
            yield
        finally:
            if hidden:
                self.hide(optimizer)

    def show(self) -> None:
        """Undo :meth:`hide`, except for options that were set in the groups since then."""
        hidden, self._hidden = self._hidden, {}
        for group, own in hidden.values():
            for option, value in own.items():
                if not (group[option][0] if option == "betas" else group.get(option)):
                    group[option] = value

    def refuse_another(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that was not bound, if the compressor applies, or will apply, the bound one's options."""
        hyper = self.hyper
        for _, ours in self._groups(optimizer):
            for _, i in ours:
                if i in self._adopted and (self._averages or hyper.momentum[i] or hyper.weight_decay[i]):
                    raise ConfigError(
                        f"the compressor applies {', '.join(self.options)} of the optimizer that was bound, and "
                        f"another one ({type(optimizer).__name__}) steps these parameters: to change the optimizer, "
                        "wrap the module in a new DistributedDataParallel and register a new compressor with it, or "
                        "leave them in whichever optimizer steps: momentum=0 and weight_decay=0 in the compressor"
                    )

    # -- the optimizer's state -----------------------------------------------------------------------------------

    def absorb(self, optimizer: torch.optim.Optimizer, *, restored: bool, kept: bool) -> None:
        """Turn the optimizer's momentum into u: SGD's buffers in any step, first moments in the step that adopts them.

        Call it after :meth:`read`. SGD's buffers are removed from its state. First moments stay there; the optimizer
        overwrites them. ``restored`` says that a state was loaded only into the optimizer. Then first moments are
        taken in a later step, too, and u is also set from buffers of zeros, because ``hvd.broadcast_optimizer_state``
        makes these. ``kept`` says that a state was loaded into the compressor; its u, if not 0, stays.
        """
        if not self.active or not optimizer.state:
            return
        found: dict[int, torch.Tensor] = {}
        for group, ours in self._groups(optimizer):
            if self._averages:
                for p, i in ours if (restored or self._steps == 0) and self._has_moment(ours) else ():
                    state = optimizer.state.get(p, {})
                    if "exp_avg" in state and (steps := _steps_of(state)):
                        found[i] = local(state["exp_avg"]) / bias_correction(float(group["betas"][0]), steps)
                continue
            for p, i in ours:
                buffer = optimizer.state.get(p, {}).pop("momentum_buffer", None)
                if buffer is not None:
                    found[i] = buffer
        self.drop_empty(optimizer)
        state = self._exchange.state
        if kept and not self._averages:
            found = {i: buffer for i, buffer in found.items() if not bool(state.momentum_buffer(i).any())}
        if restored or any(bool(local(buffer).any()) for buffer in found.values()):
            for i, buffer in found.items():
                state.absorb_momentum(i, as_array(local(buffer)))

    def saved_momentum(self, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return this rank's u as entries of the optimizer's state, by parameter. :meth:`absorb` reads them.

        A dense run may continue with it. With Adam, that run divides by the mean of squares, which is small if an entry
        was sent seldom or never. Its first step could then move the entry by any distance. ``exp_avg`` is therefore
        limited: see :func:`_largest_mean`.
        """
        saved: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for group, ours in self._groups(optimizer) if self.active else ():
            for p, i in ours:
                state = optimizer.state.get(p, {})
                if not self._averages:
                    buffer = self._momentum_like(p, i)
                    if group.get("momentum") or bool(local(buffer).any()):  # a script may set momentum to 0 for a while
                        saved[p] = {"momentum_buffer": buffer}
                elif self._has_moment(ours) and "exp_avg" in state:
                    beta1, beta2 = map(float, group["betas"])
                    moment = self._momentum_like(p, i, bias_correction(beta1, _steps_of(state)))
                    if (limit := _largest_mean(state, beta1, beta2)) is not None:
                        local(moment).clamp_(-limit, limit)
                    saved[p] = {"exp_avg": moment}
        return saved

    def _momentum_like(self, p: torch.Tensor, i: int, factor: float = 1.0) -> torch.Tensor:
        values = torch.from_numpy(self._exchange.state.whole_momentum(i) * factor)
        moment = torch.empty_like(p, requires_grad=False)
        local(moment).copy_(values.view(local(moment).shape))
        return moment

    def drop_empty(self, optimizer: torch.optim.Optimizer) -> None:
        """Delete empty entries of the optimizer's state, because Horovod would take them for a state."""
        if not optimizer.state:
            return
        for _, ours in self._groups(optimizer):
            for p, _ in ours:
                if p in optimizer.state and is_empty_entry(optimizer.state[p]):
                    del optimizer.state[p]

    # -- inside --------------------------------------------------------------------------------------------------

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], Members]]:
        """List the groups that hold parameters of the compressor. A group is searched again if its list has changed."""
        groups = []
        for group in optimizer.param_groups:
            parameters = group["params"]
            ids = list(map(id, parameters))
            known = self._members.get(id(parameters))
            if known is None or known[0] != ids:
                known = ids, [(p, self.index[id(p)]) for p in parameters if id(p) in self.index]
                self._members[id(parameters)] = known
                self._seen = []
                self._settled.clear()
            if known[1]:
                groups.append((group, known[1]))
        return groups

    def _has_moment(self, ours: Members) -> bool:
        """Return whether the compressor has adopted a group's first moment: for all of its parameters, or for none."""
        return self._steps is not None and self._will_have_moment(ours)

    def _will_have_moment(self, ours: Members) -> bool:
        return self._exchange.selects_from is not None and any(i in self._sparsified for _, i in ours)

    def _without_first(self, betas: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the betas for Adam: beta1 is 0, and with ``steps=`` beta2 grows late in the training."""
        first, second = betas
        least = self._config.least_beta2(self._step)
        if isinstance(first, torch.Tensor):
            return torch.zeros_like(first), second.clamp(min=least)
        return 0.0, max(second, least)

    def _read_moments(self, optimizer: torch.optim.Optimizer, groups: list[tuple[dict[str, Any], Members]]) -> None:
        hyper = self.hyper
        is_local = updater_of(optimizer) is not optimizer
        nesterov = bool(self._config.nesterov) or issubclass(updating_class(optimizer), torch.optim.NAdam)
        for group, ours in groups:
            beta1, takes = float(group["betas"][0]), self._has_moment(ours)
            if takes and self._settled.get(id(group)) == beta1:
                continue  # otherwise the host may wait for Adam's step count on a GPU
            if beta1 and self._will_have_moment(ours):
                self._adopted.update(i for _, i in ours)
            settled = takes
            for p, i in ours:
                hyper.momentum[i], hyper.gain[i], hyper.nesterov[i] = 0.0, 1.0, nesterov
                if takes:
                    assert self._steps is not None, "the compressor has the moment"
                    # If ranks update shares, no rank has the state of all parameters, so u begins at 0.
                    t = 1 + (self._steps if is_local else _steps_of(optimizer.state.get(p, {})))
                    hyper.momentum[i], hyper.gain[i] = running_mean(beta1, t)
                    settled &= is_settled(beta1, t)
            if settled:
                self._settled[id(group)] = beta1
            else:
                self._settled.pop(id(group), None)

    def _read_group(self, group: dict[str, Any], ours: Members, sgd: bool) -> None:
        name, config, hyper = self._names[ours[0][1]], self._config, self.hyper
        momentum, decay = float(group.get("momentum") or 0), float(group.get("weight_decay") or 0)
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
                    hyper.nesterov[i] = bool(group.get("nesterov"))
            if "weight_decay" in self.options:
                hyper.weight_decay[i] = decay
        if any(group.get(option) for option in self.options):
            self._adopted.update(i for _, i in ours)


def _largest_mean(state: Mapping[str, Any], beta1: float, beta2: float) -> torch.Tensor | None:
    """Return the largest running mean of gradients that the mean of their squares allows; None if there is no limit.

    The limit follows from the Cauchy-Schwarz inequality for Adam, and from Hölder's for Adamax.
    """
    if "exp_avg_sq" in state and beta1**2 < beta2:
        ratio = (1.0 - beta1) / ((1.0 - beta2) * (1.0 - beta1**2 / beta2)) ** 0.5
        return local(state["exp_avg_sq"]).sqrt() * ratio
    if "exp_inf" in state and beta1 < beta2:
        return local(state["exp_inf"]) * ((1.0 - beta1) / (1.0 - beta1 / beta2))
    return None


def _steps_of(state: Mapping[str, Any]) -> int:
    return int(state.get("step", 0))


def _has_moments(optimizer: torch.optim.Optimizer | None) -> bool:
    return issubclass(updating_class(optimizer), _MOMENTS)


def is_adaptive(optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether an optimizer divides gradients by a measure of their size, or takes their sign.

    Its steps are then not proportional to gradients. Classes outside of torch are recognised by their betas.
    """
    others = tuple(getattr(torch.optim, name) for name in _OTHERS if hasattr(torch.optim, name))
    groups = [] if optimizer is None else optimizer.param_groups
    return issubclass(updating_class(optimizer), (*_MOMENTS, *others)) or any("betas" in group for group in groups)


def _is_sgd(optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether parameters are updated by a ``torch.optim.SGD``."""
    return issubclass(updating_class(optimizer), torch.optim.SGD)


def _has_own_step(optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether a user's subclass has its own ``step()`` or ``_init_group()``, which may change gradients."""
    steps = (vars(cls).get(name) for cls in updating_class(optimizer).__mro__ for name in ("step", "_init_group"))
    modules = (str(getattr(step, "__module__", None)) for step in steps if step is not None)
    return any(module.partition(".")[0] not in _KNOWN_STEPS for module in modules)


def updater_of(optimizer: Any) -> Any:
    """Return the optimizer that updates parameters in the ``step()`` of an optimizer: mostly this optimizer itself.

    A class that updates only a share of the parameters on each rank must have a property ``local_optimizer``, which
    returns the optimizer of this rank's share. All options of the groups must be the same in both.
    """
    return getattr(optimizer, "local_optimizer", optimizer)


def updating_class(optimizer: torch.optim.Optimizer | None) -> type:
    """Return the class of the optimizer that updates parameters."""
    return type(updater_of(optimizer))


def users_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class that the user gave an optimizer, not the subclass that Horovod derives from it."""
    return next(cls for cls in type(optimizer).__mro__ if "skip_synchronize" not in vars(cls))


def is_empty_entry(entry: object) -> bool:
    """Return whether an entry of an optimizer's state holds nothing."""
    return isinstance(entry, dict) and all(value is None for value in entry.values())
