"""Where an engine's tensors are worked on: on their own GPU without a copy, or in host memory.

A tensor on a GPU is handed over by its address. The kernels run on a stream of their own: what the framework's current
stream did to a gradient before it was submitted is over when they read it, and the framework's stream waits for them
before the results are used. The host waits for neither.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from dgc.core.kernels import choose_kernels
from dgc.core.kernels.base import Array, Kernels
from dgc.errors import ConfigError
from dgc.torch.tensors import Result, as_array, staging

if TYPE_CHECKING:
    from dgc.core.kernels.device import DeviceKernels

_TYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    # CuPy has no bfloat16: its bits are kept as uint16.
    torch.bfloat16: np.dtype(np.uint16),
}
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
        return self.kernels.device.view(flat.data_ptr(), flat.numel(), _TYPES[flat.dtype], flat)


def tensors_for(parameters: Sequence[torch.Tensor], algorithm: str | None = None) -> HostTensors:
    """Work on the GPU when all parameters lie on one and CuPy can use it, else on the host.

    Parameters on a GPU whose gradients have to pass through the host are worth one warning, which says why: every
    gradient is then copied, and the host waits for it.
    """
    devices = {p.device for p in parameters}
    if all(device.type == "cpu" for device in devices):
        return HostTensors()
    if algorithm is not None:
        _warn_once(
            f"gradients pass through host memory: compressor {algorithm!r} works there with these options; "
            "dgc, and topk unless it has threshold='global', work on the GPU"
        )
        return HostTensors()
    if len(devices) > 1 or next(iter(devices)).type != "cuda":
        names = ", ".join(sorted(str(device) for device in devices))
        _warn_once(f"gradients pass through host memory: the parameters lie on {names}, not all on one GPU")
        return HostTensors()
    device = devices.pop()
    try:
        return DeviceTensors(cast("DeviceKernels", choose_kernels(f"gpu:{device.index or 0}")), TorchStreams(device))
    except ConfigError as error:
        _warn_once(f"gradients pass through host memory: {error}")
        return HostTensors()


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)
