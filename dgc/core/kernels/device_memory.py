"""Memory of the device backend: scratch that is allocated once, and small tables on their way to the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from dgc.core.kernels.device_runtime import Runtime

_SLOTS = 16


class Workspace:
    """Device arrays by name: they grow, and stay. All work is on one stream, so buckets may take turns with them."""

    def __init__(self, runtime: Runtime) -> None:
        """Start empty."""
        self._runtime = runtime
        self._arrays: dict[tuple[str, np.dtype], Any] = {}

    def get(self, name: str, dtype: Any, n: int, *, zeros: bool = False) -> Any:
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


class Tables:
    """Sends small host arrays to the device without waiting: through a ring of page-locked slots.

    A slot is used again only when its copy has run; with as many slots as a step has copies under way that is no wait.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Allocate nothing yet."""
        self._runtime = runtime
        self._slots: list[np.ndarray | None] = [None] * _SLOTS
        self._events: list[Any] = [None] * _SLOTS
        self._next = 0

    def send(self, *arrays: np.ndarray) -> list[Any]:
        """Return device copies of ``arrays`` as their bytes, each aligned to 16; one copy operation for all of them."""
        sizes = [-(-a.nbytes // 16) * 16 for a in arrays]
        total = max(16, sum(sizes))
        slot = self._next
        self._next = (slot + 1) % _SLOTS
        if self._events[slot] is not None:
            self._runtime.synchronize(self._events[slot])
            self._events[slot] = None
        host = self._slots[slot]
        if host is None or host.size < total:
            host = self._slots[slot] = self._runtime.host_array(total + total // 2, np.uint8)
        at = 0
        for array, size in zip(arrays, sizes, strict=True):
            host[at : at + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
            at += size
        device = self._runtime.empty(total, np.uint8)
        self._runtime.upload(device, host[:total])
        self._events[slot] = self._runtime.record()
        parts, at = [], 0
        for array, size in zip(arrays, sizes, strict=True):
            parts.append(device[at : at + array.nbytes])
            at += size
        return parts


class DeviceMemory:
    """A runtime's memory; see :class:`dgc.core.kernels.memory.Memory`."""

    def __init__(self, runtime: Runtime, sums_of_squares: Any) -> None:
        """Take the runtime, and the backend's own ``sums_of_squares``."""
        self._runtime = runtime
        self._sums_of_squares = sums_of_squares

    def zeros(self, n: int, dtype: Any) -> Any:  # noqa: D102
        return self._runtime.zeros(n, dtype)

    def host_array(self, n: int, dtype: Any) -> np.ndarray:  # noqa: D102
        return self._runtime.host_array(n, dtype)

    def to_host(self, array: Any) -> np.ndarray:  # noqa: D102
        host = np.empty(array.size, array.dtype)
        if array.size:
            self._runtime.download(host, array)
            self._runtime.synchronize(self._runtime.record())
        return host

    def copy_in(self, array: Any, values: np.ndarray) -> None:  # noqa: D102
        host = np.ascontiguousarray(values, array.dtype)
        if host.shape != (array.size,):
            raise ValueError(f"{host.shape} values for an array of {array.size} elements")
        if array.size:
            self._runtime.upload(array, host)
            self._runtime.synchronize(self._runtime.record())

    def fill(self, array: Any, value: float) -> None:  # noqa: D102
        self._runtime.fill(array, value)

    def sum_of_squares(self, array: Any) -> float:  # noqa: D102
        return float(self._sums_of_squares([array])[0])
