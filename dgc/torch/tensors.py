"""Turn torch tensors into the flat arrays of the core: views if the memory allows it, otherwise copies.

A tensor on a GPU is passed by its address. The kernels run on a stream of their own. They wait for the work that
torch's current stream had when the gradient was submitted, and torch's stream waits for them before the results are
used. The host waits for neither. If the kernels cannot use a GPU, its tensors pass through host memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from typing_extensions import override

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

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # most tensors have these types, and need no further check

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_SPREAD = 1024
_GOLDEN = (5**0.5 - 1) / 2


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a ``DTensor``: FSDP2 makes these of parameters and gradients."""
    module = sys.modules.get("torch.distributed.tensor")  # slow to import; if it is not imported, no DTensor exists
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a ``DTensor``, in the same memory. Return any other tensor itself."""
    if type(tensor) in _PLAIN or not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        shard: torch.Tensor = cast("DTensor", tensor).to_local()
        return shard


def set_memory(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Point a tensor at the memory of another one of its shape."""
    tensor.set_(other)  # type: ignore[call-overload]


def describe(name: str, tensor: torch.Tensor) -> Parameter:
    """Describe a parameter, or this rank's shard of it, for the core; types that the core refuses keep torch's name."""
    dtype = _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    return Parameter(name, tuple(local(tensor).shape), dtype)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor's values in logical order, (numel,): a view if memory, device and type allow, else a copy.

    NumPy has no bfloat16, so such a tensor is copied to float32.
    """
    flat = tensor.detach()
    if flat.dtype is torch.bfloat16:
        flat = flat.float()
    if flat.is_cuda:
        return staging(flat.numel(), flat.dtype).copy_(flat.reshape(-1)).numpy()
    return flat.reshape(-1).contiguous().cpu().numpy()


def staging(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return page-locked memory, (n,), from torch's pool: a GPU copies to and from it without the processor."""
    return torch.empty(n, dtype=dtype, pin_memory=True)


@dataclass(slots=True)
class Result:
    """The place for one parameter's result: the core writes ``array``, and ``deliver()`` copies it to the tensor.

    ``place`` is the tensor that owns the memory of ``array``, if that is neither ``tensor`` nor a NumPy array.
    """

    tensor: torch.Tensor
    array: Array
    limit: float | None
    is_view: bool
    place: torch.Tensor | None = None

    def deliver(self) -> None:
        """Copy the array into the tensor, unless they are the same memory."""
        if not self.is_view:
            target = self.tensor.detach()
            source = torch.from_numpy(self.array) if self.place is None else self.place
            target.copy_(source.view(target.shape))


class Places:
    """Chooses the memory of results: that of their gradients, unless another gradient of the step has it.

    For ``a.view(s) + b.view(s)`` autograd gives two parameters views of one tensor.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        self._names, self._parameters = names, parameters
        self._types = [p.dtype for p in parameters]
        self._owners: dict[int, int] = {}  # address -> index, in this step
        # FSDP2's gradients keep their values until results are delivered. Only the values show whether somebody has
        # changed them meanwhile, because torch._foreach_mul_ does not raise a DTensor's version counter.
        self._sharded = {i for i, p in enumerate(parameters) if is_sharded(p)}

    def begin(self) -> None:
        """Begin a step."""
        self._owners.clear()

    def place(self, index: int, gradient: torch.Tensor) -> torch.Tensor | LayoutError:
        """Return a tensor of the gradient's shape for its result, or an error if the gradient cannot be used."""
        name, parameter, built = self._names[index], self._parameters[index], self._types[index]
        if index in self._sharded:
            parameter = local(parameter)
        if gradient.shape != parameter.shape or gradient.device != parameter.device:
            return LayoutError(
                f"the gradient of {name!r} is {tuple(gradient.shape)} on {gradient.device}, the parameter is "
                f"{tuple(parameter.shape)} on {parameter.device}; build a new compressor when parameters change"
            )
        if gradient.dtype != built and torch.float64 in (gradient.dtype, built):  # float64 needs a float64 state
            wanted, given = (str(t).removeprefix("torch.") for t in (built, gradient.dtype))
            return LayoutError(
                f"the gradient of {name!r} is {given}, the parameter was {wanted} when the compressor was built; "
                "change a model's type (model.double(), model.float()) before the optimizer is wrapped, or build "
                "optimizer and compressor anew afterwards"
            )
        address = gradient.data_ptr()
        owner = self._owners.setdefault(address, index) if address else index
        if owner == index and index not in self._sharded:
            return gradient
        return torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)


def samples(tensor: torch.Tensor) -> np.ndarray:
    """Return at most 8 values spread over a tensor, as float64, to compare the tensor between ranks."""
    values = local(tensor).detach()
    places = torch.from_numpy(sample_places(values.numel())).to(values.device)
    return values.take(places).to(torch.float64).cpu().numpy()


def sum_of_bits(tensor: torch.Tensor) -> int:
    """Return a number below 2**52 that is different if two tensors differ in one value: the sum of their bits."""
    values = local(tensor).detach()
    total = int(values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)) % 2**64
    return total % 2**52 ^ total >> 52  # in a float64 the upper 12 bits are sign and exponent


def scattered_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of at most 1024 values spread over a tensor, without waiting for its device.

    Their places are multiples of the golden ratio modulo 1, so they match no pattern of rows, columns or pruned
    weights.
    """
    tensor = local(tensor)
    count = tensor.numel()
    chosen = torch.arange(min(count, _SPREAD), device=tensor.device)
    if count > _SPREAD:
        chosen = (chosen.double() * _GOLDEN).frac_().mul_(count).long()
    return tensor.detach().take(chosen)


def fingerprint(tensor: torch.Tensor) -> np.ndarray:
    """Return at most 9 float64 values: the :func:`samples` of a tensor, and its L2 norm."""
    return np.append(samples(tensor), float(torch.linalg.vector_norm(local(tensor).detach().float())))


# -- on the host or on a GPU -----------------------------------------------------------------------------------------

# The types in which the core writes results.
_NATIVE = frozenset((torch.float32, torch.float64))


def _written_as(dtype: torch.dtype) -> tuple[torch.dtype, float | None]:
    """Return the type of the core's results for gradients of ``dtype``, and the largest value of a 16-bit ``dtype``."""
    limit = torch.finfo(dtype).max if dtype in (torch.float16, torch.bfloat16) else None
    return torch.float64 if dtype is torch.float64 else torch.float32, limit


class HostTensors:
    """Turns tensors into arrays for ``kernels``: views of CPU tensors, copies of all others."""

    kernels: Kernels

    def __init__(self) -> None:
        self.kernels = choose_kernels("cpu")

    def array(self, tensor: torch.Tensor) -> Array:
        """Return the tensor's values in logical order as a 1-D array, without a copy where the memory allows it."""
        return as_array(tensor)

    def result(self, tensor: torch.Tensor) -> Result:
        """Return the place for the result of ``tensor``: its own memory, or a wider array that the core can write."""
        # Each torch call costs a microsecond, which matters with thousands of small gradients.
        flat = tensor.detach() if tensor.requires_grad else tensor
        if flat.dtype in _NATIVE and flat.is_cpu and flat.is_contiguous():
            return Result(tensor, flat.numpy().reshape(-1), None, True)
        wide, limit = _written_as(flat.dtype)
        place = staging(flat.numel(), wide) if flat.is_cuda else torch.empty(flat.numel(), dtype=wide)
        return Result(tensor, place.numpy(), limit, False)

    def ready(self) -> Ready | None:
        """Return the object that tells the kernels when they may read gradients (see ``Submission``); None: at once."""
        return None

    def release(self) -> None:
        """Let torch's stream wait for all work of the kernels."""


@dataclass(slots=True)
class Recorded:
    """A torch event, kept alive until it has been waited for."""

    event: torch.cuda.Event

    @property
    def handle(self) -> int:
        """The event's CUDA handle."""
        return int(self.event.cuda_event)


@dataclass(slots=True)
class Ready:
    """The handle of a stream on which gradients are computed, and a function that records an event on it."""

    stream: int
    record: Callable[[], Recorded]


class TorchStreams:
    """Torch's current stream on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def ready(self) -> Ready:
        """Return the handle of the current stream, and a function that records an event after its present work."""
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
        """Keep a tensor's memory from reuse until another stream, given by its handle, has finished with it."""
        tensor.record_stream(torch.cuda.ExternalStream(stream, device=self.device))  # type: ignore[arg-type]

    def allocate(self, nbytes: int, stream: int) -> int:
        """Take memory from torch's pool for a stream, and return its address."""
        return int(torch.cuda.caching_allocator_alloc(nbytes, self.device, stream))

    def free(self, address: int) -> None:
        """Return memory to torch's pool."""
        if not sys.is_finalizing():
            torch.cuda.caching_allocator_delete(address)


class DeviceTensors(HostTensors):
    """Turns tensors of one GPU into arrays, by their addresses."""

    kernels: DeviceKernels

    def __init__(self, kernels: DeviceKernels, streams: TorchStreams) -> None:
        self.kernels = kernels
        self._streams = streams
        # With two pools, neither could use the memory that the other keeps free.
        kernels.device.allocate_with(streams.allocate, streams.free)

    @override
    def array(self, tensor: torch.Tensor) -> Array:
        flat = tensor.detach().reshape(-1).contiguous()  # only a strided tensor is copied, on the framework's stream
        if not tensor.is_contiguous():
            self._streams.keep_for(flat, self.kernels.device.stream)
        return self._view(flat)

    @override
    def result(self, tensor: torch.Tensor) -> Result:
        flat = tensor.detach()
        if flat.dtype in _NATIVE and flat.is_contiguous():
            return Result(tensor, self._view(flat.view(-1)), None, True)
        wide, limit = _written_as(flat.dtype)
        place = torch.empty(flat.numel(), dtype=wide, device=flat.device)
        # The memory may be freed on a stream that has not waited for the kernels.
        self._streams.keep_for(place, self.kernels.device.stream)
        return Result(tensor, self._view(place), limit, False, place)

    @override
    def ready(self) -> Ready:
        if self._streams.capturing():
            raise ConfigError(
                "gradients are exchanged while a CUDA graph is captured, and messages cannot be replayed: capture "
                "forward and backward pass alone (torch.cuda.make_graphed_callables), and exchange outside of them"
            )
        return self._streams.ready()

    @override
    def release(self) -> None:
        if not self._streams.capturing():  # a step during a capture was refused, and no work has begun
            self.kernels.device.release_to(self._streams.current())

    def _view(self, flat: torch.Tensor) -> Array:
        return self.kernels.device.view(flat.data_ptr(), flat.numel(), FLOAT_TYPES[_NAMES[flat.dtype]], flat)


def tensors_for(parameters: Sequence[torch.Tensor], algorithm: str | None = None) -> HostTensors:
    """Choose the GPU if all parameters are on one and CuPy can use it, else the host.

    If gradients on a GPU must pass through the host, each of them is copied and waited for, and one warning says why.
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
