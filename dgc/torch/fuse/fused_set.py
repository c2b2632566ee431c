"""Neighbouring weights, their gradients and their optimizer state, seen as one 1-D parameter for one step.

Letters: n elements of a set, m members.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgc.torch.fuse.memory import Places, alias, mark_written

_KIND = attrgetter("layout", "requires_grad", "dtype")
_PLAIN_VALUES = (type(None), bool, int, float, str)

State = Mapping[Tensor, dict[str, Any]]


class FlatState(NamedTuple):
    """The state of a set.

    Attributes:
        values: as the optimizer sees it.
        copies: of its one-element tensors, the members' own ones as one (m, *shape) tensor.
    """

    values: dict[str, Any]
    copies: dict[str, Tensor]


class FlatBlock:
    """Weights without gaps between them, and the flat gradient that runs parallel to them.

    Attributes:
        members: m weights in address order.
        places: theirs in the block.
    """

    def __init__(self, members: Sequence[Tensor]) -> None:
        """Take fusable weights without gaps between them, in address order."""
        self.members = list(members)
        self.places = Places.of(self.members)
        self._addresses = [p.data_ptr() for p in members]
        # Holds the storage: as long as it lives no other allocation can take a member's address.
        self.weight = alias(members[0], self.places.offsets[-1:], (1,))
        self._grad: Tensor | None = None
        self._targets: list[Tensor] = []
        self._handles: list[Tensor] = []

    def is_in_place(self) -> bool:
        """Whether every member still lies where it was found."""
        return list(map(Tensor.data_ptr, self.members)) == self._addresses and self.places.hold(self.members)

    def sets(self, state: State, *, move_grads: bool) -> Iterator[FusedSet]:
        """Find the members that one step can update together: all of them, mostly.

        Args:
            state: the optimizer's state by parameter; moved into flat memory where it lies elsewhere.
            move_grads: whether gradients may be moved into the block's flat buffer; if not, only what lies parallel
                already is put together.
        """
        states = [state.get(p, {}) for p in self.members]
        grads = [p.grad for p in self.members]
        dtype = self.weight.dtype
        usable = [True] * len(grads) if _are_plain(grads, dtype) else [_are_plain([g], dtype) for g in grads]
        flat = flat_state(states, self.places) if all(usable) else None
        kinds: list[object] = list(usable)
        if flat is None:
            kinds = [fits and state_signature(p, s) for fits, p, s in zip(usable, self.members, states, strict=True)]
        together = move_grads or (all(usable) and self.places.hold(grads))
        start, m = 0, len(self.members)
        for stop in range(1, m + 1):
            if stop < m and kinds[stop] and kinds[stop] == kinds[start]:
                if together or self.places.part(stop - 1, stop + 1).hold(grads[stop - 1 : stop + 1]):
                    continue
            if stop - start > 1:
                yield FusedSet(self, start, stop, state, flat if stop - start == m else None)
            start = stop

    def gather_grads(self, start: int, stop: int) -> None:
        """Copy these members' gradients into the flat buffer and let ``.grad`` point there.

        The user sees the place that is stepped on, so an optimizer that changes gradients in place, or a loop that
        accumulates without clearing, behaves as with a plain step.
        """
        if self._grad is None:
            self._grad = torch.zeros_like(self.weight)
            self._targets = self.places.views(self._grad)
            self._handles = [alias(target, target.shape, target.stride()) for target in self._targets]
        storage = self._grad.untyped_storage().data_ptr()
        grads = [p.grad for p in self.members[start:stop]]
        # A gradient may lie in this very buffer, but as another view of it (transposed, or another member's place).
        sources = [g.clone() if g.untyped_storage().data_ptr() == storage else g for g in grads]
        torch._foreach_copy_(self._targets[start:stop], sources)
        for i in range(start, stop):
            # Horovod calls p.grad.set_(...), which moves the very tensor handed out here: it is never a copy target,
            # and handed out again only while it still points into the buffer.
            target = self._targets[i]
            if self._handles[i].data_ptr() != target.data_ptr():
                self._handles[i] = alias(target, target.shape, target.stride())
            self.members[i].grad = self._handles[i]


class FusedSet:
    """Members ``start:stop`` of a block, stepped as one.

    Attributes:
        members: m weights.
        weight: (n,) Parameter over their memory.
        state: the optimizer's state of ``weight``.
    """

    def __init__(self, block: FlatBlock, start: int, stop: int, state: State, flat: FlatState | None = None) -> None:
        """Gather gradients and state.

        Args:
            block: where the members are.
            start: first member.
            stop: end of the members: at least two, with gradients and equal ``state_signature``.
            state: the optimizer's state by parameter.
            flat: the members' :func:`flat_state`, where it is known.
        """
        self.members = block.members[start:stop]
        self._places = block.places if flat is not None else block.places.part(start, stop)
        n = self._places.offsets[-1:]
        if not self._places.hold([p.grad for p in self.members]):
            block.gather_grads(start, stop)
        self.weight = torch.nn.Parameter(alias(self.members[0], n, (1,)))
        self.weight.grad = alias(self.members[0].grad, n, (1,))
        if flat is None:
            states = [state.get(p, {}) for p in self.members]
            flat = flat_state(states, self._places)
            if flat is None:
                gather_state(states, self._places)
                flat = flat_state(states, self._places)
            assert flat is not None, "members of a set have equal signatures"
        self._before, self._copies = flat
        self.state = dict(self._before)

    def write_back(self, state: State) -> None:
        """Write what the step left in ``self.state`` back to the members."""
        mark_written(self.members)
        for key in self._before.keys() - self.state.keys():
            for param in self.members:
                state[param].pop(key, None)
        for key, value in self.state.items():
            before = self._before.get(key)
            if isinstance(value, Tensor) and value.shape == self.weight.shape:
                if not isinstance(before, Tensor) or value.data_ptr() != before.data_ptr():
                    self._point(state, key, self._places.views(value.detach().contiguous()))
            elif isinstance(value, Tensor):
                copies = self._copies.get(key)
                if copies is None or (copies.dtype, copies[0].shape) != (value.dtype, value.shape):
                    copies = value.new_empty((len(self.members), *value.shape))
                    self._point(state, key, copies)
                copies.copy_(value.detach())
            elif key not in self._before or type(value) is not type(before) or value != before:
                self._point(state, key, [value] * len(self.members))

    def _point(self, state: State, key: str, values: Sequence[Any] | Tensor) -> None:
        for param, value in zip(self.members, values, strict=True):
            state[param][key] = value


def state_signature(param: Tensor, state: Mapping[str, Any]) -> frozenset[tuple[Any, ...]] | None:
    """What two neighbours must have in common for one step to update both; None if ``param`` cannot be fused.

    State of the parameter's own shape is per element and only its type counts. One-element tensors (Adam's ``step``)
    and plain Python values belong to the whole parameter, so their values count as well.
    """
    entries: list[tuple[Any, ...]] = [("fusable",)]
    for key, value in state.items():
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or value.requires_grad:
                return None
            kind = (key, value.dtype, value.device)
            if value.shape == param.shape:
                entries.append(kind)
            elif value.numel() == 1:
                entries.append((*kind, tuple(value.shape), value.item()))
            else:
                return None
        elif isinstance(value, _PLAIN_VALUES):
            entries.append((key, type(value), value))
        else:
            return None
    return frozenset(entries)


def flat_state(states: Sequence[dict[str, Any]], places: Places) -> FlatState | None:
    """The members' state as that of one parameter; None if it does not lie parallel to them or is not the same.

    Args:
        states: of the m members.
        places: of the members.
    """
    flat = FlatState({}, {})
    if any(state.keys() != states[0].keys() for state in states):
        return None
    for key, first in states[0].items():
        values = [state[key] for state in states]
        if not isinstance(first, Tensor):
            # A NaN is itself, though it equals nothing.
            same = all(v is first or (type(v) is type(first) and v == first) for v in values)
            if not same or not isinstance(first, _PLAIN_VALUES):
                return None
            flat.values[key] = first
        elif not _are_plain(values, first.dtype):
            return None
        elif first.shape == places.shapes[0]:
            if list(map(Tensor.size, values)) != places.shapes or not places.hold(values):
                return None
            flat.values[key] = first.as_strided(places.offsets[-1:], (1,))
        else:
            copies = _side_by_side(values)
            if copies is None or not bool((copies == copies[0]).all()):
                return None
            flat.values[key], flat.copies[key] = first.clone(), copies
    return flat


def gather_state(states: Sequence[dict[str, Any]], places: Places) -> None:
    """Move state tensors of equal signature into flat memory: per-element ones parallel to the members."""
    for key, first in states[0].items():
        if not isinstance(first, Tensor):
            continue
        values = [state[key] for state in states]
        if first.shape != places.shapes[0]:
            targets: Sequence[Tensor] | Tensor = first.new_empty((len(states), *first.shape))
        elif places.hold(values):
            continue
        else:
            targets = places.views(first.new_empty(places.offsets[-1]))
        for state, target, value in zip(states, targets, values, strict=True):
            target.copy_(value)
            state[key] = target


def _are_plain(values: Sequence[Any], dtype: torch.dtype) -> bool:
    """Whether all are strided tensors of one type outside any graph."""
    tensors = all(issubclass(kind, Tensor) for kind in set(map(type, values)))
    return tensors and set(map(_KIND, values)) == {(torch.strided, False, dtype)}


def _side_by_side(values: Sequence[Any]) -> Tensor | None:
    """One-element tensors that lie side by side in one storage, as one (m, *shape) tensor; None if they do not."""
    first, m = values[0], len(values)
    if first.numel() != 1 or any(v.shape != first.shape for v in values):
        return None
    if not Places([first.shape] * m, [first.stride()] * m, list(range(m + 1))).hold(values):
        return None
    return first.as_strided((m, *first.shape), (1, *first.stride()))
