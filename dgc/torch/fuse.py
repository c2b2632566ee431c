"""Update many parameters with few kernel calls: Bagua's ``fuse_optimizer`` for element-wise optimizers.

The weights of a group that have the same type and device are moved into one flat buffer, once. ``fuse_step`` copies
their gradients and state next to each other, and shows the optimizer one flat parameter in the place of many. Where
anything is not as expected, the parameters of that buffer are stepped one by one.

Letters: n elements of a flat buffer, m parameters in it. Offsets count elements.
"""

from __future__ import annotations

import itertools
import types
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.errors import ConfigError
from dgc.torch.untraced import untraced

__all__ = ["fuse_optimizer", "fuse_step", "is_fused_optimizer"]

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
_PLAIN_VALUES = (type(None), bool, int, float, str)

# Cache lines and the widest vector loads are 64 bytes; no kernel asks for more than that of a weight.
_ALIGNMENT = 64


def fuse_optimizer(
    optimizer: Optimizer, do_flatten: bool = True, check_flatten: bool = True, *, elementwise: bool = False
) -> Optimizer:
    """Let ``optimizer`` update many parameters as one, by ``fuse_step``; its ``step`` and results stay as they are.

    Parameters of a group with the same type and device are moved next to each other (``param.data`` is re-pointed, the
    Parameter objects stay). Frozen, 0-dimensional, shared-memory and pinned parameters, tensor subclasses, and views of
    somebody else's buffer stay where they are and are stepped one by one.

    Call it last: after ``model.to(...)`` and after wrapping in a DistributedOptimizer. A copy of a fused optimizer is
    an ordinary optimizer.

    Args:
        optimizer: a torch optimizer, one that Horovod's or dgc's ``DistributedOptimizer`` returned included.
        do_flatten: move weights into flat memory. If False, only those are fused that lie side by side already.
        check_flatten: warn when parameters have left their flat memory. Only with ``do_flatten``.
        elementwise: say that the class of ``optimizer``, which is not torch's, may be fused: the new value of an
            element depends on that element's value, gradient and state, on the options of its group, on the loss, and
            on state that is the same for all elements of a parameter (a step count), and on nothing else: on no norm
            or mean over a parameter, no shape, no random number. Its state is in ``optimizer.state``, and it
            calls its closure once, before the update.

    Returns:
        The same object, with a method ``fuse_step(closure=None)``.

    Raises:
        RuntimeError: it is fused already.
        TypeError: not a torch optimizer.
        ConfigError: Horovod's optimizer with ``op=Adasum``; ``elementwise=True`` of a torch optimizer that is not.

    Source: Bagua, ``bagua.torch_api.contrib.fuse.optimizer``.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if is_fused_optimizer(optimizer):
        raise RuntimeError("this optimizer is fused already; call fuse_optimizer once")
    if hasattr(optimizer, "_starting_models"):
        raise ConfigError(
            "op=Adasum updates every parameter by itself inside the backward pass, so there is no step to fuse. "
            "Use op=Average, or call step()."
        )
    cls = _update_class(optimizer)
    known = any(issubclass(cls, fusable) and _plain_step(cls) is _plain_step(fusable) for fusable in _ELEMENTWISE)
    if elementwise and not known and cls.__module__.startswith("torch.optim"):
        raise ConfigError(
            f"{cls.__name__} does not update every element by itself, so it cannot be fused: "
            "leave elementwise=True out, and it is stepped plainly."
        )
    if not (known or elementwise):
        warnings.warn(
            f"{cls.__name__} is not known to update every element of a parameter by itself: fuse_step() does what "
            "step() does. If it does, have it fused with fuse_optimizer(optimizer, elementwise=True).",
            UserWarning,
            stacklevel=2,
        )
    fused = _Fused(cls, known or elementwise, do_flatten, check_flatten and do_flatten)
    if fused.elementwise:
        fused.flatten(optimizer)
    vars(optimizer).update(_dgc_fused=fused, fuse_step=types.MethodType(fuse_step, optimizer))
    return optimizer


def is_fused_optimizer(optimizer: Optimizer) -> bool:
    """Whether ``fuse_optimizer`` was applied to this object."""
    return isinstance(vars(optimizer).get("_dgc_fused"), _Fused)


@untraced
def fuse_step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Step ``optimizer`` with few kernel calls; afterwards parameters and state are as ``step(closure)`` leaves them.

    May be mixed with ``step`` freely. Where others call ``step`` (a GradScaler, a trainer), let them call this one:
    ``optimizer.step = optimizer.fuse_step``. Step hooks run once, with the optimizer's real groups. With Horovod's
    DistributedOptimizer the closure runs first, then the gradients are averaged (unless inside
    ``skip_synchronize()``), then the step hooks run, then the update.

    Args:
        optimizer: a fused optimizer.
        closure: clears the gradients, recomputes them and returns the loss. Called once, before the update.

    Returns:
        What ``step(closure)`` returns: of torch's optimizers the loss, or None without a closure.

    Raises:
        AssertionError: the optimizer is not fused.
    """
    if not is_fused_optimizer(optimizer):
        raise AssertionError(
            "fuse_step needs a fused optimizer: call fuse_optimizer(optimizer) first. An optimizer that wraps a fused "
            "one, such as a DistributedOptimizer, must be fused itself."
        )
    fused: _Fused = vars(optimizer)["_dgc_fused"]
    vars(optimizer)["_opt_called"] = True  # learning rate schedulers ask whether step() was called before them
    if fused.elementwise and hasattr(type(optimizer), "skip_synchronize"):  # Horovod's class, derived from the user's
        closure = _evaluated(closure)
        _synchronize(optimizer)
    arguments = () if closure is None else (closure,)
    # Not optimizer.step: that may be fuse_step itself, set by the user.
    return (_hooked_update if fused.elementwise else type(optimizer).step)(optimizer, *arguments)


def _update(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    closure = _evaluated(closure)
    with torch.no_grad():
        return vars(optimizer)["_dgc_fused"].update(optimizer, closure)


_hooked_update = Optimizer.profile_hook_step(_update)


def _evaluated(closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
    """Evaluate ``closure`` now, with gradients enabled as torch does; the result returns the loss it had."""
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return lambda: loss


def _synchronize(optimizer: Any) -> None:
    """What Horovod's ``step`` does ahead of the local update (0.28.1, ``horovod/torch/optimizer.py``)."""
    if optimizer._should_synchronize:
        if optimizer._synchronized:
            warnings.warn(
                "fuse_step() called after optimizer.synchronize() but outside optimizer.skip_synchronize(): "
                "gradients are exchanged a second time.",
                UserWarning,
                stacklevel=4,
            )
        optimizer.synchronize()
    optimizer._synchronized = False


def _update_class(optimizer: Optimizer) -> type[Optimizer]:
    """The class whose ``step`` is the update alone: the one behind the class that Horovod derives from the user's."""
    return next(cls for cls in type(optimizer).__mro__ if "skip_synchronize" not in vars(cls))


def _plain_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """The ``step`` of a class as it was written: torch wraps it to run step hooks around it."""
    step = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


class _Fused:
    """What a fused optimizer remembers: its options, and the flat buffers of its groups."""

    def __init__(self, cls: type[Optimizer], elementwise: bool, do_flatten: bool, check_flatten: bool) -> None:
        self.elementwise = elementwise
        self._cls, self._do_flatten, self._check_flatten = cls, do_flatten, check_flatten
        self._flats: list[_Flat] = []
        self._seen: dict[int, Tensor] = {}  # parameters that were flattened, or could not be

    @torch.no_grad()
    def flatten(self, optimizer: Optimizer) -> None:
        """Give parameters that are trainable for the first time their flat memory, once in their life."""
        for group in optimizer.param_groups:
            new = {id(p): p for p in group["params"] if id(p) not in self._seen and p.requires_grad}
            self._seen.update(new)
            kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
            for p in new.values():
                if _is_fusable(p):
                    kinds[p.dtype, p.device].append(p)
            for members in kinds.values():
                placed = sorted(members, key=Tensor.data_ptr)
                if not _are_adjacent(placed):  # moved in the group's order, whatever the allocator did
                    placed = self._moved(members, optimizer) if self._do_flatten else []
                if len(placed) > 1:
                    self._flats.append(_Flat(placed))

    def _moved(self, members: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
        """Move weights that own their memory into one buffer; values and strides stay.

        The more aligned a weight's size is, the earlier it comes. So every weight starts as well aligned as its own
        size allows, without padding, and matrix kernels keep their fast paths.
        """
        users: dict[int, int] = defaultdict(int)
        for p in {id(p): p for group in optimizer.param_groups for p in group["params"]}.values():
            if p.layout is torch.strided:
                users[p.untyped_storage().data_ptr()] += 1
        movable = [p for p in members if _owns_its_memory(p) and users[p.untyped_storage().data_ptr()] == 1]
        if len(movable) < 2:
            return []
        movable.sort(key=lambda p: min(p.nbytes & -p.nbytes, _ALIGNMENT), reverse=True)
        flat = torch.empty(sum(p.numel() for p in movable), dtype=movable[0].dtype, device=movable[0].device)
        for p, offset in zip(movable, _offsets(movable), strict=False):
            moved = _alias(flat, offset, p)
            moved.copy_(p.detach())
            p.data = moved
        return movable

    def update(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Run the plain step while the optimizer sees flat parameters, then restore its groups."""
        if any(p.requires_grad and id(p) not in self._seen for g in optimizer.param_groups for p in g["params"]):
            self.flatten(optimizer)
        if lost := [flat for flat in self._flats if not flat.is_in_place()]:
            self._flats = [flat for flat in self._flats if flat not in lost]
            if self._check_flatten:
                warnings.warn(
                    f"{sum(len(flat.members) for flat in lost)} flattened parameters, or some of them, are no longer "
                    "where fuse_optimizer put them (after model.to(...), load_state_dict(assign=True) or another "
                    "library's flattening, for example). They are updated one by one from now on: results stay right, "
                    "but the speed is lost. Call fuse_optimizer last, on a new optimizer.",
                    UserWarning,
                    stacklevel=2,
                )
        groups, state = optimizer.param_groups, optimizer.state
        shown, used = [], []
        self._flats = [part for flat in self._flats for part in flat.split()]
        for group in groups:
            here, seen = {id(p) for p in group["params"]}, dict(group)
            flats = [flat for flat in self._flats if flat.ids <= here]
            # A differentiable step must see the user's own tensors; a parameter that is listed twice is stepped twice.
            if group.get("differentiable") or len(here) < len(group["params"]):
                flats = []
            flats = [flat for flat in flats if flat.gather_gradients() and flat.gather_state(state)]
            if flats:
                fused = set().union(*(flat.ids for flat in flats))
                rest = [p for p in group["params"] if id(p) not in fused]
                seen["params"] = [*(flat.weight for flat in flats), *rest]
                seen.pop("param_names", None)  # there is no name for a flat parameter
            shown.append(seen)
            used += flats
        hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        for flat in used:
            state[flat.weight] = flat.state
        optimizer.param_groups = shown
        # A class that calls super().step() would run the hooks again, on parameters the user does not know.
        optimizer._optimizer_step_pre_hooks = optimizer._optimizer_step_post_hooks = OrderedDict()
        try:
            return _plain_step(self._cls)(optimizer, *(() if closure is None else (closure,)))
        finally:
            # After an error too: what the step had done by then is done, as it is when a plain step fails.
            optimizer.param_groups = groups
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks
            for flat in used:
                flat.state = state.pop(flat.weight, {})
                flat.scatter_state(state)
            for group, seen in zip(groups, shown, strict=True):  # some optimizers keep counters among the options
                group.update((key, value) for key, value in seen.items() if key != "params")


class _Flat:
    """Parameters without gaps between them, stepped as one."""

    def __init__(self, members: Sequence[Tensor]) -> None:
        self.members = list(members)
        self.ids = {id(p) for p in members}
        self._offsets = _offsets(members)
        self._places = _places(members)
        # Holds the storage: as long as it lives no other allocation can take a member's address.
        self.weight = torch.nn.Parameter(_alias(members[0].detach(), 0, torch.empty(self._offsets[-1], device="meta")))
        self.weight.grad = torch.empty_like(self.weight)
        self._gradients = self._parts(self.weight.grad)
        self._gradient_places = _places(self._gradients)
        self.state: dict[str, Any] = {}
        # By key of the state, what every member's state holds: part of a flat tensor, or a copy of a shared value.
        self._shares: dict[str, list[Tensor]] = {}
        self._copies: dict[str, Tensor] = {}  # (m, ...), of values that a parameter has once, as Adam's step

    def is_in_place(self) -> bool:
        return _places(self.members) == self._places

    def split(self) -> list[_Flat]:
        """Itself, or the parts on both sides of parameters without gradients: most often unused ones, which stay so."""
        runs = itertools.groupby(self.members, key=lambda p: p.grad is None)
        parts = [list(run) for missing, run in runs if not missing]
        if not parts or len(parts[0]) == len(self.members):
            return [self]
        return [_Flat(part) for part in parts if len(part) > 1]

    def gather_gradients(self) -> bool:
        """Bring gradients to their place, where the optimizer steps on them; False if they cannot be fused.

        The user sees that place as ``.grad``, so an optimizer that changes gradients in place, or a loop that
        accumulates without clearing, behaves as with a plain step.
        """
        flat: Any = self.weight.grad
        begin, grads = flat.data_ptr(), [p.grad for p in self.members]
        moved = []
        for i, (grad, place) in enumerate(zip(grads, self._gradient_places, strict=True)):
            if grad is None or grad.layout is not torch.strided or grad.requires_grad or grad.dtype != flat.dtype:
                return False
            if grad.is_conj() or grad.is_neg():
                return False
            if (grad.data_ptr(), grad.stride()) != place:
                if begin <= grad.data_ptr() < begin + flat.nbytes:  # another view of this very buffer
                    return False
                moved.append(i)
        if not moved:
            return True
        # Horovod calls p.grad.set_(...), which moves the very tensor that was handed out.
        if _places(self._gradients) != self._gradient_places:
            self._gradients = self._parts(flat)
        targets = [self._gradients[i] for i in moved]
        torch._foreach_copy_(targets, [grads[i] for i in moved])
        for i, target in zip(moved, targets, strict=True):
            self.members[i].grad = target
        return True

    def gather_state(self, state: Mapping[Tensor, dict]) -> bool:
        """Make ``self.state`` what the members' state is; False if one step cannot update all of them."""
        states = [state.get(p, {}) for p in self.members]
        keys = states[0].keys()
        if any(s.keys() != keys for s in states):
            return False
        self._forget(self._shares.keys() - keys)
        gathered = {}
        for key in keys:
            values = [s[key] for s in states]
            if isinstance(values[0], Tensor):
                if not self._gather_tensor(key, values, states):
                    return False
                gathered[key] = self.state[key]
            elif isinstance(values[0], _PLAIN_VALUES) and all(
                type(v) is type(values[0]) and v == values[0] for v in values
            ):
                gathered[key] = values[0]
            else:
                return False
        self.state = gathered
        return True

    def _gather_tensor(self, key: str, values: list[Tensor], states: list[dict[str, Any]]) -> bool:
        if not _are_same(values, self._shares.get(key)):
            first = values[0]
            for value in values:
                if not isinstance(value, Tensor) or value.layout is not torch.strided or value.requires_grad:
                    return False
                if value.dtype != first.dtype or value.device != first.device:
                    return False
            if all(value.shape == p.shape for value, p in zip(values, self.members, strict=True)):
                flat = torch.empty(self._offsets[-1], dtype=first.dtype, device=first.device)
                shares = self._parts(flat)
                torch._foreach_copy_(shares, values)
                self._share(key, flat, shares, states)
            elif all(value.numel() == 1 and value.shape == first.shape for value in values):
                self._copy(key, first.clone(), torch.stack(values), states)
            else:
                return False
        copies = self._copies.get(key)
        if copies is None:
            return True
        # Somebody else, a plain step perhaps, may have written to them.
        self.state[key].copy_(copies[0])
        return bool((copies == copies[0]).all())

    def scatter_state(self, state: Mapping[Tensor, dict]) -> None:
        """Give the members what the step left in ``self.state``; after it autograd knows that they were written."""
        for p in self.members:
            torch.autograd.graph.increment_version(p)
        states = [state[p] for p in self.members] if self.state or self._shares else []
        for key, value in self.state.items():
            if not isinstance(value, Tensor):
                for s in states:
                    s[key] = value
            elif value.shape == self.weight.shape:
                shares = self._shares.get(key)
                if shares is None or key in self._copies or shares[0].data_ptr() != value.data_ptr():
                    flat = value.detach().contiguous()
                    self._share(key, flat, self._parts(flat), states)
            elif key in self._copies and self._copies[key].shape[1:] == value.shape:
                self._copies[key].copy_(value)
            else:
                self._copy(key, value, value.expand(len(states), *value.shape).clone(), states)
        dropped = self._shares.keys() - self.state.keys()
        self._forget(dropped)
        for key, s in itertools.product(dropped, states):
            s.pop(key, None)

    def _forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            del self._shares[key]
            self._copies.pop(key, None)

    def _share(self, key: str, flat: Tensor, shares: list[Tensor], states: list[dict[str, Any]]) -> None:
        self.state[key], self._shares[key] = flat, shares
        self._copies.pop(key, None)
        for s, share in zip(states, shares, strict=True):
            s[key] = share

    def _copy(self, key: str, value: Tensor, copies: Tensor, states: list[dict[str, Any]]) -> None:
        # Views of one buffer: one call writes them all.
        self._share(key, value, list(copies), states)
        self._copies[key] = copies

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """Every member's place in ``flat`` (n,)."""
        return [_alias(flat, offset, p) for p, offset in zip(self.members, self._offsets, strict=False)]


def _are_same(values: Sequence[Any], others: Sequence[Any] | None) -> bool:
    return others is not None and all(value is other for value, other in zip(values, others, strict=True))


def _places(tensors: Iterable[Tensor]) -> list[tuple[int, tuple[int, ...]]]:
    return [(tensor.data_ptr(), tensor.stride()) for tensor in tensors]


def _offsets(members: Sequence[Tensor]) -> list[int]:
    """(m + 1,) where each begins, and n."""
    return list(itertools.accumulate((p.numel() for p in members), initial=0))


def _alias(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    """A tensor of ``like``'s shape and strides on part of ``flat``'s memory, which autograd does not know as a view.

    A plain view shares its version counter and its "is a view" flag with its base, and some in-place calls refuse
    views. Gradients and weights handed to the user must behave like ordinary tensors.
    """
    out = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return out.set_(flat.untyped_storage(), flat.storage_offset() + offset, like.shape, like.stride())


def _is_fusable(p: Tensor) -> bool:
    """Whether ``p`` could be part of a flat parameter: an ordinary tensor that fills its memory without gaps.

    A 0-dimensional one is left out because its per-element state cannot be told from a value such as Adam's ``step``.
    """
    if type(p) not in (torch.nn.Parameter, Tensor) or p.layout is not torch.strided or p.is_conj() or p.is_neg():
        return False
    return (
        p.dim() > 0
        and p.numel() > 0
        and p.data_ptr() != 0
        and torch.empty_like(p, device="meta").stride() == p.stride()
    )


def _owns_its_memory(p: Tensor) -> bool:
    if p.storage_offset() != 0 or p.untyped_storage().nbytes() != p.nbytes:
        return False
    return p.device.type != "cpu" or not (p.is_shared() or p.is_pinned())


def _are_adjacent(members: Sequence[Tensor]) -> bool:
    """Whether parameters, by ascending address, lie in one storage without gaps. Two allocations may touch, too."""
    storages = {p.untyped_storage().data_ptr() for p in members}
    ends = [p.data_ptr() + p.nbytes for p in members]
    return len(storages) == 1 and ends[:-1] == [p.data_ptr() for p in members[1:]]
