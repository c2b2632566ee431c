"""One fused set: neighbouring weights seen as a single 1-D parameter, with their gradients and optimizer state.

Letters: n elements of a set, m members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dgc.torch.fuse.memory import alias, are_parallel, mark_written

_PLAIN_VALUES = (type(None), bool, int, float, str)

_data_ptr = torch.Tensor.data_ptr
_stride = torch.Tensor.stride


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


class FlatBlock:
    """Weights without gaps between them, and the flat memory that runs parallel to them.

    A member's gradient and state have one fixed place here, whichever members happen to be fused in a step. So a
    parameter that has no gradient for a while costs no reshuffling.

    Attributes:
        members: m weights in address order; offsets: m + 1 ints, the last one is n.
    """

    def __init__(self, members: Sequence[Tensor]) -> None:
        """Take fusable weights without gaps between them, in address order."""
        self.members = list(members)
        self.offsets = [0]
        for param in members:
            self.offsets.append(self.offsets[-1] + param.numel())
        self.weight_ptrs = [p.data_ptr() for p in members]
        self.shapes = [p.shape for p in members]
        self.strides = [p.stride() for p in members]
        first = members[0]
        # Holds the storage: as long as it lives no other allocation can take a member's address.
        self.weight = alias(first.detach().as_strided((self.offsets[-1],), (1,)), 0, (self.offsets[-1],), (1,))
        self._state: dict[tuple, Tensor] = {}
        self._grad: Tensor | None = None
        self._grad_targets: list[Tensor] = []
        self._grad_handles: list[Tensor] = []

    def is_in_place(self) -> bool:
        """Whether every member still lies where it was found."""
        return (
            list(map(_data_ptr, self.members)) == self.weight_ptrs
            and list(map(_stride, self.members)) == self.strides
            and [p.shape for p in self.members] == self.shapes
        )

    def view(self, flat: Tensor, i: int) -> Tensor:
        """Member ``i``'s place in ``flat`` (n,), with the member's shape and strides."""
        return flat.as_strided(self.shapes[i], self.strides[i], flat.storage_offset() + self.offsets[i])

    def grad_buffer(self) -> Tensor:
        """(n,) buffer of the gradients, made on first use."""
        if self._grad is None:
            self._grad = torch.zeros_like(self.weight)
            self._grad_targets = [self.view(self._grad, i) for i in range(len(self.members))]
            self._grad_handles = [self._grad_handle(i) for i in range(len(self.members))]
        return self._grad

    def gather_grads(self, indices: Sequence[int]) -> None:
        """Copy these members' gradients into the flat buffer and let ``.grad`` point there.

        The user sees the place that is stepped on, so an optimizer that changes gradients in place, or a loop that
        accumulates without clearing, behaves as with a plain step.
        """
        flat = self.grad_buffer()
        begin, end = flat.data_ptr(), flat.data_ptr() + flat.numel() * flat.itemsize
        grads = [self.members[i].grad for i in indices]
        # A gradient may lie in this very buffer, but as another view of it (transposed, or another member's place).
        sources = [g.clone() if begin <= g.data_ptr() < end else g for g in grads]
        torch._foreach_copy_([self._grad_targets[i] for i in indices], sources)
        for i in indices:
            # Horovod calls p.grad.set_(...), which moves the very tensor handed out here: it is never a copy target,
            # and handed out again only while it still points into the buffer.
            if self._grad_handles[i].data_ptr() != flat.data_ptr() + self.offsets[i] * flat.itemsize:
                self._grad_handles[i] = self._grad_handle(i)
            self.members[i].grad = self._grad_handles[i]

    def owns_grad(self, grad: Tensor) -> bool:
        """Whether ``grad`` lies in the flat gradient buffer."""
        return self._grad is not None and (grad.untyped_storage().data_ptr() == self._grad.untyped_storage().data_ptr())

    def _grad_handle(self, i: int) -> Tensor:
        assert self._grad is not None
        return alias(self._grad, self.offsets[i], self.shapes[i], self.strides[i])

    def state_buffer(self, key: str, like: Tensor) -> Tensor:
        """(n,) buffer of per-element state ``key``, in the type of ``like``."""
        kind = (key, like.dtype, like.device)
        if kind not in self._state:
            self._state[kind] = torch.zeros(self.offsets[-1], dtype=like.dtype, device=like.device)
        return self._state[kind]

    def scalar_buffer(self, key: str, like: Tensor) -> Tensor:
        """(m, *shape) buffer: every member's own copy of a one-element state tensor.

        The copies are views of one buffer, so that one call writes them all, and the version counter they share tells
        whether anybody (a plain step, a loaded checkpoint) wrote any of them since.
        """
        kind = (key, like.dtype, like.device, tuple(like.shape))
        if kind not in self._state:
            shape = (len(self.members), *like.shape)
            self._state[kind] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return self._state[kind]


class _Scalar:
    """A one-element state tensor: ``shared`` goes to the optimizer, ``copies`` (m, *shape) belong to the members."""

    def __init__(self, shared: Tensor, copies: Tensor) -> None:
        self.shared = shared
        self.copies = copies
        # A write through ``.data`` shows in no version counter. On a CPU comparing the values costs next to nothing;
        # elsewhere it would wait for the device in every step.
        self.by_value = copies.device.type == "cpu"
        self.ptrs = [copy.data_ptr() for copy in copies]
        self.version = -1

    def refresh(self) -> bool:
        """Take over values written by others; False if they no longer agree."""
        if self.copies._version == self.version and not (self.by_value and bool((self.copies != self.shared).any())):
            return True
        if not bool((self.copies == self.copies[0]).all()):
            return False
        self.shared.copy_(self.copies[0])
        self.version = self.copies._version
        return True


class FusedSet:
    """Members ``start:stop`` of a block, stepped as one.

    Attributes:
        weight: (n,) Parameter over the members' memory.
        state: the optimizer's state of ``weight``.
    """

    def __init__(
        self, block: FlatBlock, start: int, stop: int, state: Mapping[Tensor, dict], *, move_grads: bool
    ) -> None:
        """Gather gradients and state.

        Args:
            block: where the members are.
            start: first member.
            stop: end of the members: at least two, with gradients and equal ``state_signature``.
            state: the optimizer's state by parameter.
            move_grads: gradients may be moved into the block's flat buffer; if not they are parallel already.
        """
        self.block, self.start, self.stop = block, start, stop
        self.members = block.members[start:stop]
        self.offsets = [offset - block.offsets[start] for offset in block.offsets[start : stop + 1]]
        self.numel = self.offsets[-1]
        self.weight = torch.nn.Parameter(alias(block.weight, block.offsets[start], (self.numel,), (1,)))
        self.weight.grad = self._gather_grads(move_grads)
        self.state: dict[str, Any] = {}
        self._flat: dict[str, tuple[Tensor, list[int]]] = {}
        self._scalars: dict[str, _Scalar] = {}
        self._values: dict[str, Any] = {}
        self._gather_state([state.get(p, {}) for p in self.members])

    def _gather_grads(self, move_grads: bool) -> Tensor:
        grads = [p.grad for p in self.members]
        if not are_parallel(grads, self.members, self.offsets):
            self.block.gather_grads(range(self.start, self.stop))
            grads = [p.grad for p in self.members]
        self._grad_ptrs = [g.data_ptr() for g in grads]
        self._grad_strides = [g.stride() for g in grads]
        first = grads[0].detach().as_strided((self.numel,), (1,))
        self._grads_in_buffer = move_grads and self.block.owns_grad(first)
        return alias(first, 0, (self.numel,), (1,))

    def _gather_state(self, states: list[dict[str, Any]]) -> None:
        for key, value in states[0].items():
            if not isinstance(value, Tensor):
                self._values[key] = self.state[key] = value
            elif value.shape == self.members[0].shape:
                tensors = [state[key] for state in states]
                if not are_parallel(tensors, self.members, self.offsets):
                    buffer = self.block.state_buffer(key, value)
                    for i, state in enumerate(states, self.start):
                        view = self.block.view(buffer, i)
                        if state[key].data_ptr() != view.data_ptr() or state[key].stride() != view.stride():
                            view.copy_(state[key].clone())  # a clone, as it may be another view of this buffer
                        state[key] = view
                    tensors = [state[key] for state in states]
                flat = tensors[0].as_strided((self.numel,), (1,))
                self._flat[key] = (flat, [t.data_ptr() for t in tensors])
                self.state[key] = flat
            else:
                copies = self.block.scalar_buffer(key, value)[self.start : self.stop]
                self._bind_scalar(key, value.clone(), copies, states)
                self.state[key] = self._scalars[key].shared

    def _bind_scalar(self, key: str, shared: Tensor, copies: Tensor, states: list[dict[str, Any]]) -> None:
        copies.copy_(shared)
        for state, copy in zip(states, copies, strict=True):
            state[key] = copy
        self._scalars[key] = _Scalar(shared, copies)
        self._values.pop(key, None)

    def prepare(self, state: Mapping[Tensor, dict]) -> bool:
        """Check that nothing was moved or rewritten since the last step, and fetch gradients that were re-allocated.

        The block's weights are checked by the plan.

        Returns:
            False if the set must be formed anew.
        """
        try:
            grads = [p.grad for p in self.members]
            ptrs = list(map(_data_ptr, grads))
            strides = list(map(_stride, grads))
        except (TypeError, RuntimeError):  # a gradient is None (TypeError) or sparse (RuntimeError: no storage)
            return False
        if not self._state_is_in_place(state):
            return False
        if ptrs == self._grad_ptrs and strides == self._grad_strides:
            return True
        if not self._grads_in_buffer:
            return False
        known = zip(self._grad_ptrs, self._grad_strides, strict=True)
        moved = [i for i, place in enumerate(zip(ptrs, strides, strict=True)) if place != next(known)]
        if any(grads[i].requires_grad for i in moved):
            return False
        self.block.gather_grads([self.start + i for i in moved])
        return True

    def _state_is_in_place(self, state: Mapping[Tensor, dict]) -> bool:
        states = [state.get(p, {}) for p in self.members]
        if not self.state:
            return not any(states)
        try:
            for key, (_, ptrs) in self._flat.items():
                if [s[key].data_ptr() for s in states] != ptrs:
                    return False
            for key, scalar in self._scalars.items():
                if [s[key].data_ptr() for s in states] != scalar.ptrs or not scalar.refresh():
                    return False
            for key, value in self._values.items():
                if any(s[key] != value for s in states):
                    return False
        except (KeyError, TypeError, AttributeError):  # state was cleared or replaced by something else
            return False
        return all(len(s) == len(self.state) for s in states)

    def write_back(self, state: Mapping[Tensor, dict]) -> bool:
        """Write what the step left in ``self.state`` back to the members.

        Per-element state is shared memory and needs nothing, unless the optimizer made a new tensor.

        Returns:
            True if keys came or went.
        """
        mark_written(self.members)
        changed = self.state.keys() != self._flat.keys() | self._scalars.keys() | self._values.keys()
        if not self.state and not changed:
            return False
        states: list[dict[str, Any]] | None = None
        for key, value in self.state.items():
            if isinstance(value, Tensor) and value.shape == (self.numel,):
                if key in self._flat and self._flat[key][0].data_ptr() == value.data_ptr():
                    continue
                states = states or [state[p] for p in self.members]
                self._adopt(key, value, states)
            elif isinstance(value, Tensor):
                scalar = self._scalars.get(key)
                if scalar is not None and scalar.copies.dtype == value.dtype and scalar.copies[0].shape == value.shape:
                    scalar.copies.copy_(value)
                    scalar.shared = value
                else:
                    states = states or [state[p] for p in self.members]
                    copies = self.block.scalar_buffer(key, value)[self.start : self.stop]
                    self._bind_scalar(key, value, copies, states)
            elif key not in self._values or value != self._values[key]:
                states = states or [state[p] for p in self.members]
                self._values[key] = value
                for member_state in states:
                    member_state[key] = value
        if changed:
            self._drop_vanished(state)
        return changed

    def _adopt(self, key: str, flat: Tensor, states: list[dict[str, Any]]) -> None:
        flat = self.state[key] = flat.detach().contiguous()
        ptrs = []
        for i, (param, member_state) in enumerate(zip(self.members, states, strict=True)):
            view = flat.as_strided(param.shape, param.stride(), flat.storage_offset() + self.offsets[i])
            member_state[key] = view
            ptrs.append(view.data_ptr())
        self._flat[key] = (flat, ptrs)
        self._values.pop(key, None)

    def _drop_vanished(self, state: Mapping[Tensor, dict]) -> None:
        for known in (self._flat, self._scalars, self._values):
            for key in known.keys() - self.state.keys():
                del known[key]
                for param in self.members:
                    state[param].pop(key, None)

    def remember_versions(self) -> None:
        """Mark the scalars as known; after all sets of a step have written, since sets of a block share buffers."""
        for scalar in self._scalars.values():
            scalar.version = scalar.copies._version
