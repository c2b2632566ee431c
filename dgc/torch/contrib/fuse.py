"""Update many parameters with few kernel calls: Bagua's ``fuse_optimizer`` for element-wise optimizers.

The weights of a group that have the same type and device are moved into one flat buffer, once. ``fuse_step`` copies
their gradients and state next to each other, and shows the optimizer one flat parameter instead of many. If the
parameters of a buffer cannot be stepped together, they are stepped one by one.

Letters: n elements of a flat buffer, m parameters in it. Offsets count elements.
"""

from __future__ import annotations

import itertools
import types
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.errors import ConfigError
from dgc.torch.adoption import users_class
from dgc.torch.front_end import end_update
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

# Cache lines and the widest vector loads have 64 bytes, and no kernel needs more alignment.
_ALIGNMENT = 64


def fuse_optimizer(
    optimizer: Optimizer, do_flatten: bool = True, check_flatten: bool = True, *, elementwise: bool = False
) -> Optimizer:
    """Give ``optimizer`` a method ``fuse_step``, which updates many parameters as one. ``step`` does not change.

    Parameters of a group with the same type and device are moved next to each other: ``param.data`` gets other memory,
    the Parameter objects stay. Frozen, 0-dimensional, shared-memory and pinned parameters, tensor subclasses, and views
    of other buffers are not moved and are stepped one by one.

    Call it last: after ``model.to(...)`` and after wrapping in a DistributedOptimizer. A copy of a fused optimizer is
    an ordinary optimizer.

    Args:
        optimizer: a torch optimizer; Horovod's or dgc's ``DistributedOptimizer`` may have returned it.
        do_flatten: move weights into flat memory. If False, fuse only weights that are next to each other already.
        check_flatten: warn when parameters have left their flat memory. This needs ``do_flatten``.
        elementwise: declare that the class of ``optimizer``, which is not torch's, may be fused. The new value of an
            element may depend only on the element's value, gradient and state, on the options of its group, on the
            loss, and on state that is equal for all elements of a parameter (a step count). It must not depend on a
            norm, mean or shape of a parameter, or on random numbers. The state must be in ``optimizer.state``, and the
            class must call its closure once, before the update.

    Returns:
        The same object, with a method ``fuse_step(closure=None)``.

    Raises:
        RuntimeError: the optimizer is fused already.
        TypeError: it is not a torch optimizer.
        ConfigError: it is Horovod's optimizer with ``op=Adasum``; or ``elementwise=True`` is given for an optimizer of
            torch that does not work element by element.

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
    cls = users_class(optimizer)
    known = any(issubclass(cls, fusable) and _plain_step(cls) is _plain_step(fusable) for fusable in _ELEMENTWISE)
    if elementwise and not known and cls.__module__.startswith("torch.optim"):
        raise ConfigError(
            f"{cls.__name__} does not update every element by itself, so it cannot be fused: "
            "leave elementwise=True out, and it is stepped plainly."
        )
    if not (known or elementwise):
        warnings.warn(
            f"{cls.__name__} is not known to update every element of a parameter by itself: fuse_step() does what "
            "step() does. If you know that it does, call fuse_optimizer(optimizer, elementwise=True).",
            UserWarning,
            stacklevel=2,
        )
    fused = _Fused(cls, known or elementwise, do_flatten, check_flatten and do_flatten)
    if fused.elementwise:
        fused.flatten(optimizer)
    vars(optimizer).update(_dgc_fused=fused, fuse_step=types.MethodType(fuse_step, optimizer))
    return optimizer


def is_fused_optimizer(optimizer: Optimizer) -> bool:
    """Return whether ``fuse_optimizer`` was applied to this object."""
    return isinstance(vars(optimizer).get("_dgc_fused"), _Fused)


@untraced
def fuse_step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Step ``optimizer`` with few kernel calls; parameters and state become the same as after ``step(closure)``.

    A script may call ``step`` and ``fuse_step`` in any order. If other code calls ``step`` (a GradScaler, a trainer),
    set ``optimizer.step = optimizer.fuse_step``. Step hooks run once, with the optimizer's real groups. With Horovod's
    DistributedOptimizer the closure runs first, then the gradients are averaged (unless inside
    ``skip_synchronize()``), then the step hooks run, then the update.

    Args:
        optimizer: a fused optimizer.
        closure: clears the gradients, recomputes them and returns the loss. It is called once, before the update.

    Returns:
        The result of ``step(closure)``: with torch's optimizers the loss, or None without a closure.

    Raises:
        AssertionError: the optimizer is not fused.
    """
    if not is_fused_optimizer(optimizer):
        raise AssertionError(
            "fuse_step needs a fused optimizer: call fuse_optimizer(optimizer) first. An optimizer that wraps a fused "
            "one, such as a DistributedOptimizer, must be fused itself."
        )
    fused: _Fused = vars(optimizer)["_dgc_fused"]
    vars(optimizer)["_opt_called"] = True  # learning rate schedulers check that step() was called before them
    if fused.elementwise and hasattr(type(optimizer), "skip_synchronize"):  # a class that Horovod has derived
        closure = _evaluated(closure)
        _synchronize(optimizer)
    arguments = () if closure is None else (closure,)
    # Not optimizer.step, because a user may have set that to fuse_step.
    step = _hooked_update if fused.elementwise else type(optimizer).step
    try:
        return step(optimizer, *arguments)
    except BaseException:
        end_update(optimizer)
        raise


def _update_fused(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    closure = _evaluated(closure)
    with torch.no_grad():
        return vars(optimizer)["_dgc_fused"].update(optimizer, closure)


_hooked_update = Optimizer.profile_hook_step(_update_fused)


def _evaluated(closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
    """Call ``closure`` now, with gradients enabled as torch does; return a function that returns its loss."""
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return lambda: loss


def _synchronize(optimizer: Any) -> None:
    """Do what Horovod's ``step`` does before the local update (0.28.1, ``horovod/torch/optimizer.py``)."""
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


def _plain_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """Return the ``step`` of a class without torch's wrapper, which runs step hooks."""
    step = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


class _Fused:
    """The options of a fused optimizer, and the flat buffers of its groups."""

    def __init__(self, cls: type[Optimizer], elementwise: bool, do_flatten: bool, check_flatten: bool) -> None:
        self.elementwise = elementwise
        self._cls, self._do_flatten, self._check_flatten = cls, do_flatten, check_flatten
        self._flats: list[_Flat] = []
        self._seen: dict[int, Tensor] = {}  # parameters that were flattened, or that cannot be flattened

    @torch.no_grad()
    def flatten(self, optimizer: Optimizer) -> None:
        """Move parameters into flat memory, each once, when it is trainable for the first time."""
        for group in optimizer.param_groups:
            new = {id(p): p for p in group["params"] if id(p) not in self._seen and p.requires_grad}
            self._seen.update(new)
            kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
            for p in filter(_is_fusable, new.values()):
                kinds[p.dtype, p.device].append(p)
            for members in kinds.values():
                placed = sorted(members, key=Tensor.data_ptr)
                if not _are_adjacent(placed):  # move them in the group's order, not in the allocator's
                    placed = _moved(members, optimizer) if self._do_flatten else []
                if len(placed) > 1:
                    self._flats.append(_Flat(placed))

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
                    "library's flattening, for example). From now on they are updated one by one: results stay right, "
                    "but the speed is lost. Call fuse_optimizer last, on a new optimizer.",
                    UserWarning,
                    stacklevel=2,
                )
        groups, state = optimizer.param_groups, optimizer.state
        shown, used = [], []
        self._flats = [part for flat in self._flats for part in flat.split()]
        for group in groups:
            here = {id(p) for p in group["params"]}
            # A differentiable step needs the user's own tensors. A parameter that is listed twice is stepped twice.
            plain = group.get("differentiable") or len(here) < len(group["params"])
            flats = [flat for flat in self._flats if not plain and flat.ids <= here and flat.gather(state)]
            fused = set().union(*(flat.ids for flat in flats))
            rest = [p for p in group["params"] if id(p) not in fused]
            shown.append({**group, "params": [*(flat.weight for flat in flats), *rest]})
            used += flats
        hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        for flat in used:
            state[flat.weight] = flat.state
        optimizer.param_groups = shown
        # A class that calls super().step() would run the hooks again, on parameters that the user does not know.
        optimizer._optimizer_step_pre_hooks = optimizer._optimizer_step_post_hooks = OrderedDict()
        try:
            return _plain_step(self._cls)(optimizer, *(() if closure is None else (closure,)))
        finally:
            # Do this after an error, too: as with a plain step, the updates that were made before the error stay.
            optimizer.param_groups = groups
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks
            for flat in used:
                flat.state = state.pop(flat.weight, {})
                flat.scatter_state(state)
            for group, seen in zip(groups, shown, strict=True):  # some optimizers store counters in the groups
                group.update((key, value) for key, value in seen.items() if key != "params")


class _Held(NamedTuple):
    """One key of a flat parameter's state: the tensor that the optimizer sees, and the members' shares of it.

    The shares are parts of the tensor, (n,). If each parameter has one value, such as Adam's step count, the shares are
    parts of ``copies``, (m, ...).
    """

    shown: Tensor
    shares: list[Tensor]
    copies: Tensor | None = None


class _Flat:
    """Parameters without gaps between them, which are stepped as one."""

    def __init__(self, members: Sequence[Tensor]) -> None:
        self.members = list(members)
        self.ids = {id(p) for p in members}
        self._offsets = _offsets(members)
        self._places_in_storage = _places_in_storage(members)
        # This reference keeps the storage alive, so that no other allocation can get a member's address.
        self.weight = torch.nn.Parameter(_alias(members[0].detach(), 0, torch.empty(self._offsets[-1], device="meta")))
        self.weight.grad = torch.empty_like(self.weight)
        self._gradients = self._parts(self.weight.grad)
        self._gradient_places = _places_in_storage(self._gradients)
        self.state: dict[str, Any] = {}
        self._held: dict[str, _Held] = {}

    def is_in_place(self) -> bool:
        return _places_in_storage(self.members) == self._places_in_storage

    def split(self) -> list[_Flat]:
        """Return [self], or smaller parts if some, but not all, parameters have no gradient.

        Such a parameter is usually one that the model never uses. The parts lie between these parameters; a part of a
        single parameter is left out.
        """
        runs = itertools.groupby(self.members, key=lambda p: p.grad is None)
        parts = [list(run) for missing, run in runs if not missing]
        if not parts or len(parts[0]) == len(self.members):
            return [self]
        return [_Flat(part) for part in parts if len(part) > 1]

    def gather(self, state: Mapping[Tensor, dict]) -> bool:
        """Bring the members' gradients and state together; return False if one step cannot update all of them."""
        return self._gather_gradients() and self._gather_state(state)

    def _gather_gradients(self) -> bool:
        """Copy gradients into the flat buffer that the optimizer uses; return False if they cannot be fused.

        Parts of this buffer become ``.grad``. So an optimizer that changes gradients in place, or a loop that
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
                if begin <= grad.data_ptr() < begin + flat.nbytes:  # another view of this buffer
                    return False
                moved.append(i)
        if not moved:
            return True
        # Horovod calls p.grad.set_(...), which gives other memory to the tensor that we have handed out.
        if _places_in_storage(self._gradients) != self._gradient_places:
            self._gradients = self._parts(flat)
        targets = [self._gradients[i] for i in moved]
        torch._foreach_copy_(targets, [grads[i] for i in moved])
        for i, target in zip(moved, targets, strict=True):
            self.members[i].grad = target
        return True

    def _gather_state(self, state: Mapping[Tensor, dict]) -> bool:
        """Build ``self.state`` from the members' states; return False if they differ in more than their elements."""
        states = [state.get(p, {}) for p in self.members]
        keys, self.state = states[0].keys(), {}
        self._held = {key: held for key, held in self._held.items() if key in keys}
        if any(s.keys() != keys for s in states):
            return False
        for key in keys:
            values = [s[key] for s in states]
            first, held = values[0], self._held.get(key)
            if isinstance(first, _PLAIN_VALUES):
                if any(type(v) is not type(first) or v != first for v in values):
                    return False
                self.state[key] = first
                continue
            if not isinstance(first, Tensor):
                return False
            if held is None or any(v is not share for v, share in zip(values, held.shares, strict=True)):
                if (held := self._held_of(values)) is None:
                    return False
                self._hold(key, held, states)
            if held.copies is not None:
                # Other code, such as a plain step, may have written to them.
                held.shown.copy_(held.copies[0])
                if not (held.copies == held.copies[0]).all():
                    return False
            self.state[key] = held.shown
        return True

    def _held_of(self, values: list[Any]) -> _Held | None:
        """Copy the members' tensors of one key into new memory.

        Return None if they are neither one value for each element nor one value for each parameter.
        """
        first = values[0]
        for value in values:
            if not isinstance(value, Tensor) or value.layout is not torch.strided or value.requires_grad:
                return None
            if value.dtype != first.dtype or value.device != first.device:
                return None
        if all(value.shape == p.shape for value, p in zip(values, self.members, strict=True)):
            flat = torch.empty(self._offsets[-1], dtype=first.dtype, device=first.device)
            shares = self._parts(flat)
            torch._foreach_copy_(shares, values)
            return _Held(flat, shares)
        if any(value.numel() != 1 or value.shape != first.shape for value in values):
            return None
        copies = torch.stack(values)
        return _Held(first.clone(), list(copies), copies)  # views of one buffer, so that one call writes all

    def scatter_state(self, state: Mapping[Tensor, dict]) -> None:
        """Give the members the state that the step left in ``self.state``, and tell autograd that they have changed."""
        for p in self.members:
            torch.autograd.graph.increment_version(p)
        if not self.state and self.members[0] not in state:
            return
        states = [state[p] for p in self.members]
        for key, s in itertools.product(states[0].keys() - self.state.keys(), states):
            del s[key]
        for key, value in self.state.items():
            if not isinstance(value, Tensor):
                for s in states:
                    s[key] = value
                continue
            held = self._held.get(key)
            copies = None if held is None else held.copies
            if value.shape == self.weight.shape:
                if held is None or copies is not None or held.shown.data_ptr() != value.data_ptr():
                    flat = value.detach().contiguous()
                    self._hold(key, _Held(flat, self._parts(flat)), states)
            elif copies is not None and copies.shape[1:] == value.shape:
                copies.copy_(value)
            else:
                copies = value.expand(len(states), *value.shape).clone()
                self._hold(key, _Held(value, list(copies), copies), states)

    def _hold(self, key: str, held: _Held, states: list[dict[str, Any]]) -> None:
        self._held[key] = held
        for s, share in zip(states, held.shares, strict=True):
            s[key] = share

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """Return every member's part of ``flat``, (n,)."""
        return [_alias(flat, offset, p) for p, offset in zip(self.members, self._offsets, strict=False)]


def _moved(members: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
    """Move weights that own their memory into one buffer; keep values and strides.

    Weights are ordered by the alignment of their size, largest first. So every weight is aligned as well as its size
    allows, without padding, and matrix kernels keep their fast paths.
    """
    everywhere = (p for group in optimizer.param_groups for p in group["params"] if p.layout is torch.strided)
    users = Counter(p.untyped_storage().data_ptr() for p in everywhere)
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


def _places_in_storage(tensors: Iterable[Tensor]) -> list[tuple[int, tuple[int, ...]]]:
    return [(tensor.data_ptr(), tensor.stride()) for tensor in tensors]


def _offsets(members: Sequence[Tensor]) -> list[int]:
    """Return where each member begins, and n: (m + 1,)."""
    return list(itertools.accumulate((p.numel() for p in members), initial=0))


def _alias(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    """Return a tensor with the shape and strides of ``like`` in ``flat``'s memory. Autograd does not see it as a view.

    A plain view shares its version counter with its base, and some in-place calls refuse views. Gradients and weights
    that a user sees must behave like ordinary tensors.
    """
    out = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return out.set_(flat.untyped_storage(), flat.storage_offset() + offset, like.shape, like.stride())


def _is_fusable(p: Tensor) -> bool:
    """Return whether ``p`` can be part of a flat parameter: an ordinary tensor without gaps in its memory.

    A 0-dimensional tensor cannot be: its state for each element looks like a single value such as Adam's ``step``.
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
    """Return whether parameters, sorted by address, lie in one storage without gaps (two storages may be adjacent)."""
    storages = {p.untyped_storage().data_ptr() for p in members}
    ends = [p.data_ptr() + p.nbytes for p in members]
    return len(storages) == 1 and ends[:-1] == [p.data_ptr() for p in members[1:]]
