"""A GPU, through CuPy. Only this module of the core imports CuPy, and only ``choose_kernels`` imports this module."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike
from typing_extensions import override

from dgc.core.kernels.base import Array
from dgc.core.kernels.device import Device, DeviceKernels

# The stream has the highest priority, because its kernels are short and the network waits for them.
HIGHEST_PRIORITY = -100


def device_count() -> int:
    """Return how many devices this process sees; CuPy raises CUDARuntimeError without a driver."""
    return int(cupy.cuda.runtime.getDeviceCount())


class CurrentDevice:
    """Make a device the current one: for good on a thread of this package, in a ``with`` block on a caller's thread.

    A thread of this package must not return to device 0, where every thread begins. With CUDA 12, this would open a
    context on device 0, which takes half a gigabyte there for every process of the host. ``with`` may be nested.
    """

    def __init__(self, device: int, current: Callable[[], int], choose: Callable[[int], None]) -> None:
        """Take CUDA's ``cudaGetDevice`` and ``cudaSetDevice``."""
        self._device, self._current, self._choose = device, current, choose
        self._thread = threading.local()

    def adopt_thread(self) -> None:
        """Let the calling thread keep this device."""
        self._choose(self._device)
        self._thread.adopted = True

    def __enter__(self) -> None:
        thread = self._thread
        if getattr(thread, "adopted", False):
            return
        before = self._current()
        if before != self._device:
            self._choose(self._device)
        thread.__dict__.setdefault("before", []).append(before)

    def __exit__(self, *_: object) -> None:
        thread = self._thread
        if getattr(thread, "adopted", False):
            return
        before = thread.before.pop()
        if before != self._device:
            self._choose(before)


class CupyDevice(Device):
    """One GPU, with a stream that does not wait for the default stream; events order their work."""

    def __init__(self, number: int) -> None:
        cuda = cupy.cuda.runtime
        self.xp, self.name, self.number = cupy, "cupy", number
        self._current = CurrentDevice(number, cuda.getDevice, cuda.setDevice)
        with self._current:
            self.stream = int(cuda.streamCreateWithPriority(cuda.streamNonBlocking, HIGHEST_PRIORITY))
            self._stream = cupy.cuda.ExternalStream(self.stream, number)
        self._malloc: Callable[[int], Any] = cupy.cuda.alloc
        self._thread = threading.local()

    def __enter__(self) -> None:
        with ExitStack() as entered:
            for each in (self._current, self._stream, *self._memory()):
                entered.enter_context(each)
            self._thread.__dict__.setdefault("entered", []).append(entered.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._thread.entered.pop().__exit__(*error)

    def _memory(self) -> list[AbstractContextManager[None]]:
        return [] if self._malloc is cupy.cuda.alloc else [cupy.cuda.using_allocator(self._malloc)]

    @override
    def adopt_thread(self) -> None:
        self._current.adopt_thread()

    @override
    def allocate_with(self, allocate: Callable[[int, int], int], free: Callable[[int], None]) -> None:
        self.record().synchronize()  # after this, no memory of the other pool is in use
        pool = cupy.cuda.PythonFunctionAllocator(
            lambda nbytes, _: allocate(max(1, nbytes), self.stream), lambda address, _: free(address)
        )
        self._malloc = pool.malloc

    @override
    def host_array(self, n: int, dtype: DTypeLike) -> np.ndarray:
        nbytes = n * np.dtype(dtype).itemsize
        if nbytes == 0:
            return np.empty(0, dtype)
        with self._current:
            memory = cupy.cuda.alloc_pinned_memory(nbytes)
        return np.frombuffer(memory, np.uint8, nbytes).view(dtype)

    @override
    def view(self, address: int, n: int, dtype: DTypeLike, owner: object) -> Array:
        if n == 0:
            with self:
                return cupy.empty(0, dtype)
        memory = cupy.cuda.UnownedMemory(address, n * np.dtype(dtype).itemsize, owner, self.number)
        return cupy.ndarray((n,), dtype, cupy.cuda.MemoryPointer(memory, 0))

    @override
    def upload(self, array: Array, host: np.ndarray) -> None:
        self._copy(array.data.ptr, host.ctypes.data, host.nbytes, cupy.cuda.runtime.memcpyHostToDevice)

    @override
    def fetch(self, array: Array, host: np.ndarray) -> None:
        self._copy(host.ctypes.data, array.data.ptr, host.nbytes, cupy.cuda.runtime.memcpyDeviceToHost)

    def _copy(self, to: int, source: int, nbytes: int, kind: int) -> None:
        if nbytes:
            with self._current:
                cupy.cuda.runtime.memcpyAsync(to, source, nbytes, kind, self.stream)

    @override
    def record(self) -> Any:
        with self._current:
            # block=True makes waiting threads sleep; a spinning thread would take a core from the data loader.
            event = cupy.cuda.Event(block=True, disable_timing=True)
            event.record(self._stream)
        return event

    @override
    def wait_for(self, event: int) -> None:
        with self._current:
            cupy.cuda.runtime.streamWaitEvent(self.stream, event)

    @override
    def release_to(self, stream: int) -> None:
        event = self.record()
        with self._current:
            cupy.cuda.runtime.streamWaitEvent(stream, event.ptr)


class CupyKernels(DeviceKernels):
    """The device kernels on one GPU, compiled at construction, so that no step waits for a compiler."""

    def __init__(self, number: int = 0) -> None:
        """Compile and run every kernel: that takes seconds, unless CuPy's cache (``~/.cupy/kernel_cache``) has them."""
        super().__init__(CupyDevice(number))
        self.warm_up()

    @override
    def describe(self) -> str:
        number = self.device.number  # type: ignore[attr-defined]
        properties = cupy.cuda.runtime.getDeviceProperties(number)
        return f"cupy {cupy.__version__} on device {number} ({properties['name'].decode()})"
