"""Torch tensors as the core sees them: flat views where the memory allows it, copies where not.

A tensor on a GPU is handed over by its address. The kernels run on a stream of their own: what the framework's current
stream did to a gradient before it was submitted is over when they read it, and the framework's stream waits for them
before the results are used. The host waits for neither. Where the kernels cannot work on it, it passes through host
memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from dgc.adapter.agreement import sample_places
from dgc.adapter.checks import warn_once
from dgc.core.kernels import choose_kernels
from dgc.core.kernels.base import Array, Kernels
from dgc.core.layout import FLOAT_TYPES, Parameter
from dgc.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from dgc.core.kernels.device import DeviceKernels

_NAMES = {getattr(torch, name): name for name in FLOAT_TYPES}

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # most are, and need no look at the type

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

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


def sum_of_bits(tensor: torch.Tensor) -> int:
    """Return the sum of all values' bits, modulo 2**52: it differs between two tensors that differ in one value."""
    values = local(tensor).detach()
    return int(values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)) % 2**52


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


# -- on the host or on a GPU -----------------------------------------------------------------------------------------

_NATIVE = frozenset((torch.float32, torch.float64))
"""Types of NumPy's that the core writes results in."""


class HostTensors:
    """How tensors become the arrays that ``kernels`` work on; here views of CPU tensors, and copies of all others."""

    kernels: Kernels

    def __init__(self) -> None:
        self.kernels = choose_kernels("cpu")

    def array(self, tensor: torch.Tensor) -> Array:
        """The tensor's values in logical order as a 1-D array, without a copy where the memory allows."""
        return as_array(tensor)

    def result(self, tensor: torch.Tensor) -> Result:
        """Where the core writes what is to come to ``tensor``: into itself where it can, else an array of float32."""
        # Each call of torch's costs a microsecond, which tells with thousands of small gradients.
        flat = tensor.detach() if tensor.requires_grad else tensor
        if flat.dtype in _NATIVE and flat.is_cpu and flat.is_contiguous():
            return Result(tensor, flat.numpy().reshape(-1), None, True)
        limit = torch.finfo(flat.dtype).max if flat.dtype in (torch.float16, torch.bfloat16) else None
        wide = torch.float64 if flat.dtype is torch.float64 else torch.float32
        place = staging(flat.numel(), wide) if flat.is_cuda else torch.empty(flat.numel(), dtype=wide)
        return Result(tensor, place.numpy(), limit, False)

    def ready(self) -> Ready | None:
        """What tells the kernels when they may read what was made so far; None for always. See ``Submission``."""
        return None

    def release(self) -> None:
        """Let the framework's stream wait for everything that the kernels were given."""


@dataclass(slots=True)
class Recorded:
    """An event of the framework, kept alive until it has been waited for; ``handle`` is CUDA's."""

    event: torch.cuda.Event

    @property
    def handle(self) -> int:
        """The event's CUDA handle."""
        return int(self.event.cuda_event)


@dataclass(slots=True)
class Ready:
    """A stream on which gradients are made, by handle, and what records an event there."""

    stream: int
    record: Callable[[], Recorded]


class TorchStreams:
    """Torch's current stream on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def ready(self) -> Ready:
        """The current stream, for an event that stands behind what it was given so far."""
        stream = torch.cuda.current_stream(self.device)
        return Ready(int(stream.cuda_stream), partial(self._record, stream))

    def _record(self, stream: torch.cuda.Stream) -> Recorded:
        event = torch.cuda.Event()
        event.record(stream)
        return Recorded(event)

    def current(self) -> int:
        """The current stream's CUDA handle."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def capturing(self) -> bool:
        """Whether the current stream is recording a CUDA graph instead of running."""
        return torch.cuda.is_current_stream_capturing()

    def keep_for(self, tensor: torch.Tensor, stream: int) -> None:
        """Memory of ours is used by another stream, by handle: it is handed out again when that is through, too."""
        tensor.record_stream(torch.cuda.ExternalStream(stream, device=self.device))  # type: ignore[arg-type]

    def allocate(self, nbytes: int, stream: int) -> int:
        """Take memory from torch's pool for a stream; returns its address."""
        return int(torch.cuda.caching_allocator_alloc(nbytes, self.device, stream))

    def free(self, address: int) -> None:
        """Give it back."""
        if not sys.is_finalizing():
            torch.cuda.caching_allocator_delete(address)


class DeviceTensors(HostTensors):
    """Tensors of one GPU, by address."""

    kernels: DeviceKernels

    def __init__(self, kernels: DeviceKernels, streams: TorchStreams) -> None:
        self.kernels = kernels
        self._streams = streams
        # Two pools would keep memory from each other that neither uses.
        kernels.device.allocate_with(streams.allocate, streams.free)

    def array(self, tensor: torch.Tensor) -> Array:  # noqa: D102
        flat = tensor.detach().reshape(-1).contiguous()  # a copy, on the framework's stream, only of strided tensors
        if not tensor.is_contiguous():
            self._streams.keep_for(flat, self.kernels.device.stream)
        return self._view(flat)

    def result(self, tensor: torch.Tensor) -> Result:  # noqa: D102
        flat = tensor.detach()
        if flat.dtype in _NATIVE and flat.is_contiguous():
            return Result(tensor, self._view(flat.view(-1)), None, True)
        wide = torch.float64 if flat.dtype is torch.float64 else torch.float32
        limit = torch.finfo(flat.dtype).max if flat.dtype in (torch.float16, torch.bfloat16) else None
        place = torch.empty(flat.numel(), dtype=wide, device=flat.device)
        # It may be let go on a stream that has not waited for the kernels.
        self._streams.keep_for(place, self.kernels.device.stream)
        return Result(tensor, self._view(place), limit, False, place)

    def ready(self) -> Ready:  # noqa: D102
        if self._streams.capturing():
            raise ConfigError(
                "gradients are exchanged while a CUDA graph is captured, and messages cannot be replayed: capture "
                "forward and backward pass alone (torch.cuda.make_graphed_callables), and exchange outside of them"
            )
        return self._streams.ready()

    def release(self) -> None:  # noqa: D102
        if not self._streams.capturing():  # a step that was refused for that: nothing was begun
            self.kernels.device.release_to(self._streams.current())

    def _view(self, flat: torch.Tensor) -> Array:
        return self.kernels.device.view(flat.data_ptr(), flat.numel(), FLOAT_TYPES[_NAMES[flat.dtype]], flat)


def tensors_for(parameters: Sequence[torch.Tensor], algorithm: str | None = None) -> HostTensors:
    """Work on the GPU when all parameters lie on one and CuPy can use it, else on the host.

    Parameters on a GPU whose gradients have to pass through the host are worth one warning, which says why: every
    gradient is then copied, and the host waits for it.
    """
    devices = {p.device for p in parameters}
    if all(device.type == "cpu" for device in devices):
        return HostTensors()
    if algorithm is not None:
        warn_once(
            f"gradients pass through host memory: compressor {algorithm!r} works there with these options; "
            "dgc, and topk unless it has threshold='global', work on the GPU"
        )
        return HostTensors()
    if len(devices) > 1 or next(iter(devices)).type != "cuda":
        names = ", ".join(sorted(str(device) for device in devices))
        warn_once(f"gradients pass through host memory: the parameters lie on {names}, not all on one GPU")
        return HostTensors()
    device = devices.pop()
    try:
        return DeviceTensors(cast("DeviceKernels", choose_kernels(f"gpu:{device.index or 0}")), TorchStreams(device))
    except ConfigError as error:
        warn_once(f"gradients pass through host memory: {error}")
        return HostTensors()
