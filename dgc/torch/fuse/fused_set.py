"""One fused set: neighbouring weights seen as a single 1-D parameter, with their gradients and optimizer state.

Letters: n elements of a set, m members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dgc.torch.fuse.memory import alias, are_parallel, mark_written, places

_PLAIN_VALUES = (type(None), bool, int, float, str)


def state_signature(param: Tensor, state: Mapping[str, Any]) -> frozenset | None:
    """What two neighbours must have in common for one step to update both; None if ``param`` cannot be fused.

    State of the parameter's own shape is per element and only its type counts. One-element tensors (Adam's ``step``)
    and plain Python values belong to the whole parameter, so their values count as well.
    """
    entries: list[tuple] = []
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


class FusedSet:
    """Weights without gaps between them, stepped as one.

    Attributes:
        members: m weights in address order; offsets: m + 1 ints, the last one is n.
        weight: (n,) Parameter over the members' memory.
        state: the optimizer's state of ``weight``.
    """

    def __init__(self, members: Sequence[Tensor], state: Mapping[Tensor, dict]) -> None:
        """Gather gradients and state.

        Args:
            members: at least two, with gradients and equal ``state_signature``.
            state: the optimizer's state by parameter.
        """
        self.members = list(members)
        self.offsets = [0]
        for param in members:
            self.offsets.append(self.offsets[-1] + param.numel())
        # Holds the storage: as long as it lives no other allocation can take a member's address.
        self.weight = torch.nn.Parameter(self._flat(members[0]))
        grads: list[Any] = [p.grad for p in members]
        self._handles: list[Tensor] = []  # views of a gradient buffer of our own, if there is one
        if not are_parallel(grads, members, self.offsets):
            self._buffer = torch.empty_like(self.weight)
            self._handles = grads = [self._part(self._buffer, i) for i in range(len(members))]
            self._gather_grads(range(len(members)))
        self._grad_places = places(grads)
        self.weight.grad = self._flat(grads[0])
        self.state: dict[str, Any] = {}
        self._known: dict[str, Any] = {}  # per-element tensors and plain values of the state
        self._copies: dict[str, Tensor] = {}  # (m, *shape): every member's copy of a one-element tensor
        self._versions: dict[str, int] = {}  # of the copies
        self._state_ptrs: dict[str, list[int]] = {}
        self._gather_state([state.get(p, {}) for p in members])

    def _flat(self, first: Tensor) -> Tensor:
        """(n,) alias of the memory that begins with the first member's ``first``."""
        return alias(first.detach(), 0, (self.offsets[-1],), (1,))

    def _part(self, flat: Tensor, i: int) -> Tensor:
        """Member ``i``'s place in ``flat`` (n,)."""
        return alias(flat, self.offsets[i], self.members[i].shape, self.members[i].stride())

    def _gather_grads(self, indices: Sequence[int]) -> None:
        """Copy these members' gradients into the buffer and let ``.grad`` point there.

        The user sees the place that is stepped on, so an optimizer that changes gradients in place, or a loop that
        accumulates without clearing, behaves as with a plain step.
        """
        begin = self._buffer.data_ptr()
        end = begin + self._buffer.nbytes
        grads: list[Any] = [self.members[i].grad for i in indices]
        # A gradient may lie in this very buffer, but as another view of it (transposed, or another member's place).
        sources = [g.clone() if begin <= g.data_ptr() < end else g for g in grads]
        targets = [self._handles[i] for i in indices]
        torch._foreach_copy_(targets, sources)
        for i, target in zip(indices, targets, strict=True):
            self.members[i].grad = target

    def _gather_state(self, states: list[dict[str, Any]]) -> None:
        for key, value in states[0].items():
            if not isinstance(value, Tensor):
                self.state[key] = self._known[key] = value
                continue
            tensors = [state[key] for state in states]
            if value.shape == self.members[0].shape:
                if not are_parallel(tensors, self.members, self.offsets):
                    flat = torch.empty(self.offsets[-1], dtype=value.dtype, device=value.device)
                    for i, (state, old) in enumerate(zip(states, tensors, strict=True)):
                        state[key] = self._view(flat, i).copy_(old)
                else:
                    flat = value.as_strided((self.offsets[-1],), (1,))
                self.state[key] = self._known[key] = flat
            else:
                # Views of one buffer: one call writes them all, and they share a version counter.
                copies = torch.stack(tensors)
                for state, copy in zip(states, copies, strict=True):
                    state[key] = copy
                self.state[key], self._copies[key], self._versions[key] = value.clone(), copies, copies._version
            self._state_ptrs[key] = [state[key].data_ptr() for state in states]

    def _view(self, flat: Tensor, i: int) -> Tensor:
        p = self.members[i]
        return flat.as_strided(p.shape, p.stride(), flat.storage_offset() + self.offsets[i])

    def prepare(self, state: Mapping[Tensor, dict]) -> bool:
        """Check that nothing was moved or rewritten since the last step, and fetch gradients that were re-allocated.

        Returns:
            False if the set must be formed anew.
        """
        try:
            found = places([p.grad for p in self.members])
        except (TypeError, RuntimeError):  # a gradient is None, or sparse
            return False
        if not self._state_is_in_place([state.get(p, {}) for p in self.members]):
            return False
        if found == self._grad_places:
            return True
        moved = [i for i, place in enumerate(found) if place != self._grad_places[i]]
        if not self._handles or any(self.members[i].grad.requires_grad for i in moved):  # type: ignore[union-attr]
            return False
        # Horovod calls p.grad.set_(...), which moves the very tensor that was handed out.
        lost = zip(self._grad_places, places(self._handles), strict=True)
        for i in [i for i, (place, handle) in enumerate(lost) if place != handle]:
            self._handles[i] = self._part(self._buffer, i)
        self._gather_grads(moved)
        return True

    def _state_is_in_place(self, states: list[dict[str, Any]]) -> bool:
        if any(len(s) != len(self.state) for s in states):
            return False
        try:
            for key, value in self.state.items():
                if key not in self._state_ptrs:
                    if any(s[key] != value for s in states):
                        return False
                elif [s[key].data_ptr() for s in states] != self._state_ptrs[key]:
                    return False
        except (KeyError, TypeError, AttributeError):  # state was cleared or replaced by something else
            return False
        return all(self._refresh(key, copies) for key, copies in self._copies.items())

    def _refresh(self, key: str, copies: Tensor) -> bool:
        """Take over a value that others wrote (a plain step, a checkpoint); False if members no longer agree."""
        # A write through ``.data`` shows in no version counter; comparing values would wait for a GPU in every step.
        shared = self.state[key]
        if copies._version == self._versions[key] and (copies.device.type != "cpu" or bool((copies == shared).all())):
            return True
        self._versions[key] = copies._version
        shared.copy_(copies[0])
        return bool((copies == shared).all())

    def write_back(self, state: Mapping[Tensor, dict]) -> bool:
        """Write what the step left in ``self.state`` to the members; per-element state is shared memory.

        Returns:
            True if the set must be formed anew, since keys came or went, or tensors were replaced.
        """
        mark_written(self.members)
        if not self.state and not self._known and not self._copies:
            return False
        if self.state.keys() != self._known.keys() | self._copies.keys():
            return self._scatter(state)
        for key, value in self.state.items():
            if key in self._copies:
                copies = self._copies[key]
                if not isinstance(value, Tensor) or (value.dtype, value.shape) != (copies.dtype, copies.shape[1:]):
                    return self._scatter(state)
                copies.copy_(value)
                self._versions[key] = copies._version
            elif key in self._state_ptrs or isinstance(value, Tensor):
                if value is not self._known[key]:
                    return self._scatter(state)
            elif value != self._known[key]:
                self._known[key] = value
                for p in self.members:
                    state[p][key] = value
        return False

    def _scatter(self, state: Mapping[Tensor, dict]) -> bool:
        """Give every member its own part of ``self.state``."""
        for key, value in self.state.items():
            if isinstance(value, Tensor) and value.shape == (self.offsets[-1],):
                flat = value.detach().contiguous()
                for i, p in enumerate(self.members):
                    state[p][key] = self._view(flat, i)
            else:
                for p in self.members:
                    state[p][key] = value.clone() if isinstance(value, Tensor) else value
        for key in (self._known.keys() | self._copies.keys()) - self.state.keys():
            for p in self.members:
                state[p].pop(key, None)
        return True
