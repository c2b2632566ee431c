"""Where arrays live: the few things that state and messages need to know about it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Memory(Protocol):
    """The memory of one backend. n elements; *device* arrays are those that the backend's kernels work on."""

    def zeros(self, n: int, dtype: Any) -> Any:
        """Return a device array of zeros, (n,)."""
        ...

    def host_array(self, n: int, dtype: Any) -> np.ndarray:
        """Return host memory for what travels, (n,), not initialised; page-locked where that helps."""
        ...

    def to_host(self, array: Any) -> np.ndarray:
        """Return a copy of a device array. Waits."""
        ...

    def copy_in(self, array: Any, values: np.ndarray) -> None:
        """Overwrite a device array, (n,), with host values of any float type. Waits."""
        ...

    def copy(self, array: Any, source: Any) -> None:
        """Overwrite a device array, (n,), with another of its type, in the order of the kernels' work."""
        ...

    def fill(self, array: Any, value: float) -> None:
        """Overwrite a device array with one value, in the order of the kernels' work."""
        ...

    def sum_of_squares(self, array: Any) -> float:
        """Return the sum of squares. Waits."""
        ...


class HostMemory:
    """NumPy arrays on both sides."""

    def zeros(self, n: int, dtype: Any) -> np.ndarray:  # noqa: D102
        return np.zeros(n, dtype)

    def host_array(self, n: int, dtype: Any) -> np.ndarray:  # noqa: D102
        return np.empty(n, dtype)

    def to_host(self, array: np.ndarray) -> np.ndarray:  # noqa: D102
        return array.copy()

    def copy_in(self, array: np.ndarray, values: np.ndarray) -> None:  # noqa: D102
        array[...] = values

    def copy(self, array: np.ndarray, source: np.ndarray) -> None:  # noqa: D102
        array[...] = source

    def fill(self, array: np.ndarray, value: float) -> None:  # noqa: D102
        array.fill(value)

    def sum_of_squares(self, array: np.ndarray) -> float:  # noqa: D102
        return float(np.dot(array, array))


def memory_of(kernels: Any) -> Memory:
    """The memory that a backend works on; the host's for those that do not say."""
    return getattr(kernels, "memory", None) or HostMemory()
