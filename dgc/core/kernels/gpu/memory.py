"""What runs the device backend's kernels, its memory, and small tables on their way to the device.

A :class:`Runtime` is CuPy on a GPU, or a stand-in on a processor in tests. One stream: everything that is enqueued runs
in the order in which it was enqueued, later than the call returns. Its *device arrays* are CuPy arrays, or what a
stand-in takes for them: 1-D, contiguous, with ``size``, ``dtype``, ``nbytes`` and slices that are views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from dgc.core.kernels.base import Array

PLACE_BYTES = 16
"""Of what :meth:`Runtime.require_groups` returns."""
GROUP_BYTES = 256
"""Of what :meth:`Runtime.new_group` returns."""


class Runtime(Protocol):
    """One device and one stream on it. Safe to use from several threads."""

    name: str

    @property
    def stream_handle(self) -> int:
        """The stream's CUDA handle."""
        ...

    def adopt_thread(self) -> None:
        """This thread belongs to the exchange: it works on this device alone from now on."""
        ...

    def allocate_with(self, allocate: Callable[[int, int], int], free: Callable[[int], None]) -> None:
        """Take device memory from a framework, so that two pools do not keep it from each other.

        Args:
            allocate: from bytes and the handle of the stream that will use them to an address.
            free: takes an address back.
        """
        ...

    def empty(self, n: int, dtype: DTypeLike) -> Array:
        """Return a device array of n elements, not initialised."""
        ...

    def zeros(self, n: int, dtype: DTypeLike) -> Array:
        """Return a device array of zeros."""
        ...

    def fill(self, array: Array, value: float) -> None:
        """Enqueue: set all elements to ``value``, 0 or NaN."""
        ...

    def host_array(self, n: int, dtype: DTypeLike) -> np.ndarray:
        """Return page-locked host memory of zeros, which copies reach without the processor, and kernels by address."""
        ...

    def address(self, array: Array) -> int:
        """Where a device array begins."""
        ...

    def view(self, address: int, n: int, dtype: DTypeLike, owner: object) -> Array:
        """Memory of this device that belongs to somebody else, as a device array; ``owner`` is kept alive with it."""
        ...

    def upload(self, device: Array, host: np.ndarray) -> None:
        """Enqueue: copy ``host`` to ``device``, of the same type and size. ``host`` must stay until it has run."""
        ...

    def download(self, host: np.ndarray, device: Array) -> None:
        """Enqueue: copy ``device`` to ``host``."""
        ...

    def copy(self, array: Array, source: Array) -> None:
        """Enqueue: copy one device array to another, of the same type and size."""
        ...

    def launch(self, name: str, state_bits: int, grid: int, arguments: Sequence[Any]) -> None:
        """Enqueue a kernel: ``grid`` blocks of THREADS threads.

        Args:
            name: one of :func:`dgc.core.kernels.gpu.cuda.source.kernel_names`.
            state_bits: 32 or 64.
            grid: at least 1.
            arguments: device arrays, page-locked host arrays, and NumPy scalars of exactly the kernel's types.
        """
        ...

    def record(self) -> Any:
        """Enqueue an event and return it."""
        ...

    def synchronize(self, event: object) -> None:
        """Wait until everything before the event has run. The only call that waits."""
        ...

    def wait_for(self, event: int) -> None:
        """Enqueue: wait for another stream's event, given as its CUDA handle."""
        ...

    def release_to(self, stream: int) -> None:
        """Let another stream, given as its CUDA handle, wait for everything enqueued here so far."""
        ...

    def require_groups(self) -> bytes:
        """Look for what devices add up with, and say which device of which machine this is: PLACE_BYTES.

        Raises:
            RuntimeError: this process has no NCCL.
        """
        ...

    def new_group(self) -> bytes:
        """What devices that are to add up together are given to :meth:`join`: GROUP_BYTES; one of them makes it.

        Raises:
            RuntimeError: it cannot.
        """
        ...

    def join(self, group: bytes, rank: int, size: int) -> Joined:
        """Connect this device with the others of a group. Collective, blocking.

        Args:
            group: from :meth:`new_group` of one of them.
            rank: this device's place in the group, 0 <= rank < size.
            size: number of devices; each has another one.

        Raises:
            RuntimeError: they could not be connected.
        """
        ...


class Joined(Protocol):
    """Devices that add up together."""

    def add_up(self, array: Array) -> None:
        """Enqueue: the sum over the group in the place of each one's array, the same bits everywhere. Collective."""
        ...


class Workspace:
    """Device arrays by name: they grow, and stay. All work is on one stream, so buckets may take turns with them."""

    def __init__(self, runtime: Runtime) -> None:
        """Start empty."""
        self._runtime = runtime
        self._arrays: dict[tuple[str, np.dtype], Any] = {}

    def get(self, name: str, dtype: DTypeLike, n: int, *, zeros: bool = False) -> Array:
        """Return a device array of n elements, the same memory as last time if that suffices.

        Args:
            name: what it is for.
            dtype: its type.
            n: its size.
            zeros: begin with zeros; the kernels leave zeros behind in such an array.
        """
        key = (name, np.dtype(dtype))
        array = self._arrays.get(key)
        if array is None or array.size < n:
            size = max(64, n + n // 4)
            array = self._runtime.zeros(size, dtype) if zeros else self._runtime.empty(size, dtype)
            self._arrays[key] = array
        return array[:n]

    def clear(self) -> None:
        """Let go of them; what is enqueued keeps its memory, which is used again in the stream's order."""
        self._arrays.clear()


class Tables:
    """Sends small host arrays to the device without waiting, through page-locked slots.

    A slot is free again when its copy has certainly run, which is known after the next wait for something later.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Allocate nothing yet."""
        self._runtime = runtime
        self._free: list[np.ndarray] = []
        self._used: list[np.ndarray] = []

    def send(self, *arrays: np.ndarray) -> list[Any]:
        """Return device copies of ``arrays`` as their bytes, each aligned to 16; one copy operation for all of them."""
        sizes = [-(-a.nbytes // 16) * 16 for a in arrays]
        total = max(16, sum(sizes))
        host = self._slot(total)
        at = 0
        for array, size in zip(arrays, sizes, strict=True):
            host[at : at + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
            at += size
        device = self._runtime.empty(total, np.uint8)
        self._runtime.upload(device, host[:total])
        parts, at = [], 0
        for array, size in zip(arrays, sizes, strict=True):
            parts.append(device[at : at + array.nbytes])
            at += size
        return parts

    def lend(self, array: np.ndarray) -> list[np.ndarray]:
        """Return the bytes of ``array`` in page-locked memory, which kernels read as they read a device's."""
        host = self._slot(max(16, array.nbytes))[: array.nbytes]
        host[:] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        return [host]

    def all_arrived(self) -> None:
        """Say that everything sent so far has been copied."""
        self._free += self._used
        self._used = []

    def _slot(self, nbytes: int) -> np.ndarray:
        slot = next((s for s in self._free if s.size >= nbytes), None)
        if slot is None:
            # A smaller one is given up for it, so that their number stays that of the copies between two waits.
            if self._free:
                self._free.pop()
            slot = self._runtime.host_array(max(4096, nbytes + nbytes // 2), np.uint8)
        else:
            self._free = [s for s in self._free if s is not slot]
        self._used.append(slot)
        return slot


class DeviceMemory:
    """A runtime's memory; see :class:`dgc.core.kernels.base.Memory`."""

    def __init__(self, runtime: Runtime, sums_of_squares: Any) -> None:
        """Take the runtime, and the backend's own ``sums_of_squares``."""
        self._runtime = runtime
        self._sums_of_squares = sums_of_squares

    def zeros(self, n: int, dtype: DTypeLike) -> Array:  # noqa: D102
        return self._runtime.zeros(n, dtype)

    def host_array(self, n: int, dtype: DTypeLike) -> np.ndarray:  # noqa: D102
        return self._runtime.host_array(n, dtype)

    def to_host(self, array: Array) -> np.ndarray:  # noqa: D102
        host = np.empty(array.size, array.dtype)
        if array.size:
            self._runtime.download(host, array)
            self._runtime.synchronize(self._runtime.record())
        return host

    def copy_in(self, array: Array, values: np.ndarray) -> None:  # noqa: D102
        host = np.ascontiguousarray(values, array.dtype)
        if host.shape != (array.size,):
            raise ValueError(f"{host.shape} values for an array of {array.size} elements")
        if array.size:
            self._runtime.upload(array, host)
            self._runtime.synchronize(self._runtime.record())

    def copy(self, array: Array, source: Array) -> None:  # noqa: D102
        if array.size:
            self._runtime.copy(array, source)

    def fill(self, array: Array, value: float) -> None:  # noqa: D102
        self._runtime.fill(array, value)

    def sum_of_squares(self, array: Array) -> float:  # noqa: D102
        return float(self._sums_of_squares([array])[0])
