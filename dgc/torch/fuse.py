"""Update many parameters with few kernel calls: Bagua's ``fuse_optimizer`` for element-wise optimizers.

The weights of a group that have the same type and device are moved into one flat buffer, once. ``fuse_step`` finds
runs of weights that lie side by side, and copies the gradients and state of each run into flat buffers, too. The
optimizer then sees one flat parameter for each run. Parameters that cannot be stepped together are stepped one by one.

Letters: n elements of a run, m parameters in it. Offsets count elements.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import types
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.errors import ConfigError
from dgc.torch.adoption import users_class
from dgc.torch.front_end import end_update
from dgc.torch.untraced import untraced

__all__ = ["fuse_optimizer", "fuse_step", "is_fused_optimizer"]

_NAMES = "SGD Adam AdamW NAdam RAdam Adamax Adadelta Adagrad RMSprop Rprop ASGD"
_ELEMENTWISE = tuple(getattr(torch.optim, name) for name in _NAMES.split())

# Cache lines and the widest vector loads have 64 bytes, and no kernel needs more alignment.
_ALIGNMENT = 64


def fuse_optimizer(
    optimizer: Optimizer, do_flatten: bool = True, check_flatten: bool = True, *, elementwise: bool = False
) -> Optimizer:
    """Give ``optimizer`` a method ``fuse_step``, which updates many parameters as one. ``step`` does not change.

    Call it last: after ``model.to(...)`` and after wrapping in a DistributedOptimizer. A copy of a fused optimizer is
    an ordinary optimizer.

    Args:
        optimizer: a torch optimizer; Horovod's or dgc's ``DistributedOptimizer`` may have returned it.
        do_flatten: move weights into flat memory: ``param.data`` gets other memory, the Parameter objects stay. If
            False, fuse only weights that are next to each other already.
        check_flatten: warn when parameters have left their flat memory.
        elementwise: declare that a class that is not torch's may be fused: docs/from-bagua.md says what this means. Its
            state must be in ``optimizer.state``, and it must call its closure once, before the update.

    Returns:
        The same object, with a method ``fuse_step(closure=None)``.

    Raises:
        RuntimeError: the optimizer is fused already.
        TypeError: it is not a torch optimizer.
        ConfigError: it is Horovod's optimizer with ``op=Adasum``.

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
    known = any(issubclass(cls, c) and inspect.unwrap(cls.step) is inspect.unwrap(c.step) for c in _ELEMENTWISE)
    if not (known or elementwise):
        warnings.warn(
            f"{cls.__name__} is not known to update every element of a parameter by itself: fuse_step() does what "
            "step() does. If you know that it does, call fuse_optimizer(optimizer, elementwise=True).",
            UserWarning,
            stacklevel=2,
        )
    fused = _Fused(cls, known or elementwise, do_flatten, check_flatten)
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

    If other code calls ``step`` (a GradScaler, a trainer), set ``optimizer.step = optimizer.fuse_step``.

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
            warnings.warn("fuse_step() after synchronize() outside skip_synchronize() exchanges twice", stacklevel=4)
        optimizer.synchronize()
    optimizer._synchronized = False


class _Fused:
    """The options of a fused optimizer, and the runs of parameters that it steps as one."""

    def __init__(self, cls: type[Optimizer], elementwise: bool, do_flatten: bool, check_flatten: bool) -> None:
        self.elementwise = elementwise
        step: Any = cls.step
        self._step = step.__wrapped__ if getattr(step, "hooked", False) else step  # without torch's hooks around it
        self._do_flatten, self._check_flatten = do_flatten, check_flatten
        self._seen: dict[int, bool] = {}  # id of each parameter that was trainable once: whether it is an ordinary one
        self._moved: list[tuple[Tensor, int]] = []  # parameters in flat memory, and their addresses
        self._runs: dict[int, tuple[list[Any], list[_Run]]] = {}  # of each group: its places, and its runs

    @torch.no_grad()
    def flatten(self, optimizer: Optimizer) -> None:
        """Move parameters that own their memory into flat memory, each once, when it is first seen to be trainable."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        owners = Counter(p.untyped_storage().data_ptr() for p in params if p.layout is torch.strided)
        for group in optimizer.param_groups:
            kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.requires_grad and id(p) not in self._seen:
                    ordinary = type(p) in (torch.nn.Parameter, Tensor) and p.layout is torch.strided
                    self._seen[id(p)] = ordinary
                    if ordinary and _is_fusable(p) and _owns_its_memory(p):
                        if owners[p.untyped_storage().data_ptr()] == 1:
                            kinds[p.dtype, p.device].append(p)
            for members in kinds.values() if self._do_flatten else ():
                # Largest powers of 2 first: then every weight is aligned as well as its size allows, without padding.
                members.sort(key=lambda p: min(p.nbytes & -p.nbytes, _ALIGNMENT), reverse=True)
                flat = torch.empty(sum(p.numel() for p in members), dtype=members[0].dtype, device=members[0].device)
                for p, part in zip(members, _parts(flat, members), strict=True):
                    p.data = part.copy_(p)
                self._moved += [(p, p.data_ptr()) for p in members]

    def update(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Run the plain step while the optimizer sees flat parameters, then restore its groups."""
        if any(p.requires_grad and id(p) not in self._seen for g in optimizer.param_groups for p in g["params"]):
            self.flatten(optimizer)
        if self._check_flatten and any(p.data_ptr() != place for p, place in self._moved):
            self._moved = []
            warnings.warn(
                "parameters are no longer where fuse_optimizer put them (after model.to(...), "
                "load_state_dict(assign=True) or another library's flattening, for example). These are updated one by "
                "one: results stay right, but the speed is lost. Call fuse_optimizer last, on a new optimizer.",
                UserWarning,
                stacklevel=2,
            )
        groups, state = optimizer.param_groups, optimizer.state
        shown, used = [], []
        for number, group in enumerate(groups):
            runs = [run for run in self._runs_of(number, group) if run.gather_gradients() and run.gather_state(state)]
            fused = {id(p) for run in runs for p in run.members}
            rest = [p for p in group["params"] if id(p) not in fused]
            shown.append({**group, "params": [*(run.weight for run in runs), *rest]})
            used += runs
        hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        for run in used:
            if run.state:
                state[run.weight] = run.state
        optimizer.param_groups = shown
        # A class that calls super().step() would run the hooks again, on parameters that the user does not know.
        optimizer._optimizer_step_pre_hooks = optimizer._optimizer_step_post_hooks = OrderedDict()
        try:
            return self._step(optimizer, *(() if closure is None else (closure,)))
        finally:
            # Do this after an error, too: as with a plain step, the updates that were made before the error stay.
            optimizer.param_groups = groups
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks
            for run in used:
                run.scatter_state(state)
            for group, seen in zip(groups, shown, strict=True):  # some optimizers store counters in the groups
                group.update((key, value) for key, value in seen.items() if key != "params")

    def _runs_of(self, number: int, group: dict[str, Any]) -> list[_Run]:
        """Return the runs of a group, from the last step if every parameter is still in its place."""
        params = group["params"]
        # A differentiable step needs the user's own tensors. A parameter that is listed twice is stepped twice.
        if group.get("differentiable") or len(set(map(id, params))) < len(params):
            return []
        usable = [p for p in params if self._seen.get(id(p)) and p.grad is not None]
        places = [(id(p), p.data_ptr(), p.stride()) for p in usable]
        known, runs = self._runs.get(number, ([], []))
        if places != known:
            runs = [_Run(members) for members in _adjacent(usable) if len(members) > 1]
            self._runs[number] = places, runs
        return runs


class _Run:
    """Parameters without gaps between them, which are stepped as one.

    Attributes:
        weight: the flat parameter, (n,), with a gradient, (n,). It keeps the members' memory alive.
        state: the state of ``weight`` before a step.
    """

    def __init__(self, members: Sequence[Tensor]) -> None:
        self.members = members
        n = sum(p.numel() for p in members)
        self.weight = torch.nn.Parameter(_alias(members[0].detach(), 0, (n,), (1,)))
        self.state: dict[str, Any] = {}
        self._held: dict[str, tuple[Tensor, list[Tensor]]] = {}  # state for each element, (n,), and the members' parts
        self._renew_gradient()

    def _renew_gradient(self) -> None:
        self.weight.grad = torch.empty_like(self.weight)
        self._gradients = _parts(self.weight.grad, self.members)
        self._places = _places(self._gradients)

    def gather_gradients(self) -> bool:
        """Copy gradients that are elsewhere into the flat gradient; return False if they are not dense or of one type.

        Parts of the flat gradient become ``.grad``. So an optimizer that changes gradients in place, or a loop that
        accumulates without clearing, behaves as with a plain step.
        """
        grads: list[Any] = [p.grad for p in self.members]
        if any(grad.layout is not torch.strided for grad in grads):
            return False
        moved = [i for i, place in enumerate(_places(grads)) if place != self._places[i]]
        flat: Any = self.weight.grad
        begin, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
        for grad in (grads[i] for i in moved):
            if grad.requires_grad or grad.dtype != flat.dtype or grad.is_conj() or grad.is_neg():
                return False
        if not moved:
            return True
        # A script may swap the gradients of two parameters. Horovod gives other memory to our part: p.grad.set_(...).
        if any(begin <= grads[i].data_ptr() < end for i in moved) or _places(self._gradients) != self._places:
            self._renew_gradient()
            moved = list(range(len(grads)))
        torch._foreach_copy_([self._gradients[i] for i in moved], [grads[i] for i in moved])
        for i in moved:
            self.members[i].grad = self._gradients[i]
        return True

    def gather_state(self, state: Any) -> bool:
        """Build ``self.state`` from the members' states; return False if they differ in more than their elements."""
        states = [state.get(p, {}) for p in self.members]
        self.state = {}
        if any(each.keys() != states[0].keys() for each in states):
            return False
        for key, first in states[0].items():
            values = [each[key] for each in states]
            if not isinstance(first, Tensor):
                plain = isinstance(first, (type(None), bool, int, float, str))
                if not plain or any(type(v) is not type(first) or v != first for v in values):
                    return False
                self.state[key] = first
            elif key in self._held and all(map(operator.is_, values, self._held[key][1])):
                self.state[key] = self._held[key][0]
            elif any(type(v) is not Tensor or v.layout is not torch.strided or v.requires_grad for v in values):
                return False
            elif len({(v.dtype, v.device) for v in values}) > 1:
                return False
            elif all(v.shape == p.shape for v, p in zip(values, self.members, strict=True)):
                self.state[key] = self._hold(key, torch.empty_like(self.weight, dtype=first.dtype, device=first.device))
                torch._foreach_copy_(self._held[key][1], values)
            elif all(v.numel() == 1 and v.shape == first.shape for v in values):
                column = torch.stack(values)
                if not (column == column[0]).all():
                    return False
                self.state[key] = column[0].clone()
            else:
                return False
        return True

    def scatter_state(self, state: Any) -> None:
        """Give the members the state that the step has left, and tell autograd that they have changed."""
        for p in self.members:
            torch.autograd.graph.increment_version(p)
        new = state.pop(self.weight, None)
        if new is None:
            return
        columns: list[Any] = []
        for key, value in new.items():
            if not isinstance(value, Tensor):
                columns.append(itertools.repeat(value))
            elif value.shape == self.weight.shape:
                if key not in self._held or value is not self._held[key][0]:
                    self._hold(key, value.detach().contiguous())
                columns.append(self._held[key][1])
            else:  # one value for each parameter, such as Adam's step
                columns.append(value.expand(len(self.members), *value.shape).clone().unbind())
        for p, *values in zip(self.members, *columns, strict=False):
            state[p] = dict(zip(new, values, strict=True))

    def _hold(self, key: str, flat: Tensor) -> Tensor:
        self._held[key] = flat, _parts(flat, self.members)
        return flat


def _adjacent(params: Sequence[Tensor]) -> list[list[Tensor]]:
    """Split parameters into runs that lie in one storage without gaps; return [] if some of them overlap."""
    runs: list[list[Tensor]] = []
    storage, end = 0, 0
    for p in sorted(params, key=Tensor.data_ptr):
        begin, own, fusable = p.data_ptr(), p.untyped_storage().data_ptr(), _is_fusable(p)
        if begin < end:
            return []
        if fusable and (begin, own) == (end, storage) and runs[-1][0].dtype is p.dtype:
            runs[-1].append(p)
        else:
            runs.append([p])
        storage, end = own if fusable else 0, begin + p.nbytes
    return runs


def _places(tensors: Sequence[Tensor]) -> list[tuple[int, tuple[int, ...]]]:
    return [(tensor.data_ptr(), tensor.stride()) for tensor in tensors]


def _parts(flat: Tensor, members: Sequence[Tensor]) -> list[Tensor]:
    """Return every member's part of ``flat``, (n,), with the member's shape and strides."""
    offsets = itertools.accumulate((p.numel() for p in members), initial=0)
    return [_alias(flat, offset, p.shape, p.stride()) for p, offset in zip(members, offsets, strict=False)]


def _alias(flat: Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return a tensor in ``flat``'s memory that autograd does not see as a view.

    A plain view shares its version counter with its base, and some in-place calls refuse views. Gradients and weights
    that a user sees must behave like ordinary tensors.
    """
    out = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return out.set_(flat.untyped_storage(), flat.storage_offset() + offset, shape, stride)


def _is_fusable(p: Tensor) -> bool:
    """Return whether ``p`` has at least one dimension, and no gaps in its memory.

    The state of a 0-dimensional parameter looks like a single value, such as Adam's ``step``.
    """
    if p.is_conj() or p.is_neg() or p.dim() == 0 or p.numel() == 0:
        return False
    return p.data_ptr() != 0 and torch.empty_like(p, device="meta").stride() == p.stride()


def _owns_its_memory(p: Tensor) -> bool:
    if p.storage_offset() != 0 or p.untyped_storage().nbytes() != p.nbytes:
        return False
    return p.device.type != "cpu" or not (p.is_shared() or p.is_pinned())
