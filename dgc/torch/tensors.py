"""Torch tensors as the core sees them: flat NumPy views where the memory allows it, copies where not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from dgc.core.kernels.base import Array
from dgc.core.layout import Parameter
from dgc.errors import LayoutError
from dgc.transport.agreement import sample_places

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # most are, and need no look at the type

_SPREAD = 1024
_GOLDEN = (5**0.5 - 1) / 2


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a ``DTensor``, as FSDP2 makes of parameters and gradients."""
    module = sys.modules.get("torch.distributed.tensor")  # slow to import; where it was not, there is none
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a ``DTensor`` on this rank, in the same memory; any other tensor itself."""
    if type(tensor) in _PLAIN or not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        shard: torch.Tensor = cast("DTensor", tensor).to_local()
        return shard


def set_memory(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let a tensor have the memory of another of its shape."""
    tensor.set_(other)  # type: ignore[call-overload]


def describe(name: str, tensor: torch.Tensor) -> Parameter:
    """A parameter, or this rank's shard, as the core lists it; types that the core refuses keep torch's name."""
    dtype = _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    return Parameter(name, tuple(local(tensor).shape), dtype)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's values in logical order as (numel,): a view where memory, device and type allow, else a copy.

    bfloat16, which NumPy does not know, comes as a float32 copy.
    """
    flat = tensor.detach()
    if flat.dtype is torch.bfloat16:
        flat = flat.float()
    if flat.is_cuda:
        return staging(flat.numel(), flat.dtype).copy_(flat.reshape(-1)).numpy()
    return flat.reshape(-1).contiguous().cpu().numpy()


def staging(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Page-locked memory, (n,), out of torch's own pool: a GPU copies to and from it without the processor's help."""
    return torch.empty(n, dtype=dtype, pin_memory=True)


@dataclass(slots=True)
class Result:
    """Where one parameter's result goes: ``array`` is written by the core, ``deliver()`` brings it to the tensor.

    ``place`` is the tensor whose memory ``array`` is, where that is neither ``tensor`` nor NumPy's.
    """

    tensor: torch.Tensor
    array: Array
    limit: float | None
    is_view: bool
    place: torch.Tensor | None = None

    def deliver(self) -> None:
        """Copy the array into the tensor unless it is its memory."""
        if not self.is_view:
            target = self.tensor.detach()
            source = torch.from_numpy(self.array) if self.place is None else self.place
            target.copy_(source.view(target.shape))


class Places:
    """Where results may be written: where their gradients are, except where two gradients share memory.

    Autograd gives two parameters views of one tensor in ``a.view(s) + b.view(s)``, say: the first result would
    overwrite the second gradient. Which share shows in the first step, in which every result has memory of its own
    until the step ends.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        self._names, self._parameters = names, parameters
        self._types = [p.dtype for p in parameters]
        self._first = True
        self._owners: dict[int, int] = {}  # address -> index, of this step
        # FSDP2's gradients keep their values until results are delivered: these alone show whether somebody has changed
        # them meanwhile, as torch._foreach_mul_ raises no version of a DTensor.
        self._sharing = {i for i, p in enumerate(parameters) if is_sharded(p)}
        self._apart: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # index, gradient and result of the first step

    def begin(self) -> None:
        """A step begins."""
        self._owners.clear()
        self._apart.clear()

    def end(self) -> None:
        """A step has ended well: results that need no memory of their own move to where their gradients are.

        Gradients may be views of one buffer, which their owner clears as a whole.
        """
        self._first = False
        for index, gradient, result in self._apart:
            if index not in self._sharing:
                gradient.copy_(result)
                set_memory(result, gradient)
        self._apart.clear()

    def place(self, index: int, gradient: torch.Tensor) -> torch.Tensor | LayoutError:
        """A tensor of the gradient's shape for its result, or the error, for all ranks, that it cannot be used."""
        name, parameter, built = self._names[index], self._parameters[index], self._types[index]
        if index in self._sharing:
            parameter = local(parameter)
        if gradient.shape != parameter.shape or gradient.device != parameter.device:
            return LayoutError(
                f"the gradient of {name!r} is {tuple(gradient.shape)} on {gradient.device}, the parameter is "
                f"{tuple(parameter.shape)} on {parameter.device}; build a new compressor when parameters change"
            )
        if gradient.dtype != built and torch.float64 in (gradient.dtype, built):  # whose state is float64
            wanted, given = (str(t).removeprefix("torch.") for t in (built, gradient.dtype))
            return LayoutError(
                f"the gradient of {name!r} is {given}, the parameter was {wanted} when the compressor was built; "
                "change a model's type (model.double(), model.float()) before the optimizer is wrapped, or build "
                "optimizer and compressor anew afterwards"
            )
        address = gradient.data_ptr()
        owner = self._owners.setdefault(address, index) if address else index
        if owner != index and not {owner, index} <= self._sharing:
            if not self._first:
                return LayoutError(
                    f"the gradients of {self._names[index]!r} and {self._names[owner]!r} share memory, as they did not "
                    "in the first step; where a step begins to do so use a copy: a.view(s) + b.view(s).clone()"
                )
            self._sharing |= {owner, index}
        if self._first or index in self._sharing:
            result = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
            if self._first:
                self._apart.append((index, gradient.detach(), result))
            return result
        return gradient


def samples(tensor: torch.Tensor) -> np.ndarray:
    """(at most 8,) float64: a few values, spread over a tensor, to compare it between ranks."""
    values = local(tensor).detach()
    places = torch.from_numpy(sample_places(values.numel())).to(values.device)
    return values.take(places).to(torch.float64).cpu().numpy()


def scattered_values(tensor: torch.Tensor) -> torch.Tensor:
    """(at most 1024,) A copy of values from all over a tensor, made without waiting for its device.

    Their places keep to no rhythm, as rows, columns and pruned weights do: multiples of the golden ratio, modulo 1.
    """
    tensor = local(tensor)
    count = tensor.numel()
    chosen = torch.arange(min(count, _SPREAD), device=tensor.device)
    if count > _SPREAD:
        chosen = (chosen.double() * _GOLDEN).frac_().mul_(count).long()
    return tensor.detach().take(chosen)


def fingerprint(tensor: torch.Tensor) -> np.ndarray:
    """(at most 9,) float64: :func:`samples` of a tensor and its L2 norm, which a change of any part of it moves."""
    return np.append(samples(tensor), float(torch.linalg.vector_norm(local(tensor).detach().float())))
