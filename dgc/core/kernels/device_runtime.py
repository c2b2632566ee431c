"""What the device backend asks of whatever runs its kernels: CuPy on a GPU, a stand-in on a processor in tests.

One stream: everything that is enqueued runs in the order in which it was enqueued, later than the call returns. The
*device arrays* of a runtime are CuPy arrays, or what a stand-in takes for them: 1-D, contiguous, with ``size``,
``dtype``, ``nbytes`` and slices that are views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Runtime(Protocol):
    """One device and one stream on it. Safe to use from several threads."""

    name: str

    def empty(self, n: int, dtype: Any) -> Any:
        """Return a device array of n elements, not initialised."""
        ...

    def zeros(self, n: int, dtype: Any) -> Any:
        """Return a device array of zeros."""
        ...

    def fill(self, array: Any, value: float) -> None:
        """Enqueue: set all elements to ``value``."""
        ...

    def host_array(self, n: int, dtype: Any) -> np.ndarray:
        """Return page-locked host memory of zeros, which copies reach without the processor."""
        ...

    def address(self, array: Any) -> int:
        """Where a device array begins."""
        ...

    def view(self, address: int, n: int, dtype: Any, owner: Any) -> Any:
        """Memory of this device that belongs to somebody else, as a device array; ``owner`` is kept alive with it."""
        ...

    def upload(self, device: Any, host: np.ndarray) -> None:
        """Enqueue: copy ``host`` to ``device``, of the same type and size. ``host`` must stay until it has run."""
        ...

    def download(self, host: np.ndarray, device: Any) -> None:
        """Enqueue: copy ``device`` to ``host``."""
        ...

    def copy(self, array: Any, source: Any) -> None:
        """Enqueue: copy one device array to another, of the same type and size."""
        ...

    def launch(self, name: str, state_bits: int, grid: int, arguments: Sequence[Any]) -> None:
        """Enqueue a kernel: ``grid`` blocks of THREADS threads.

        Args:
            name: one of :func:`dgc.core.kernels.source.kernel_names`.
            state_bits: 32 or 64.
            grid: at least 1.
            arguments: device arrays, and NumPy scalars of exactly the kernel's types.
        """
        ...

    def record(self) -> Any:
        """Enqueue an event and return it."""
        ...

    def synchronize(self, event: Any) -> None:
        """Wait until everything before the event has run. The only call that waits."""
        ...

    def wait_for(self, event: int) -> None:
        """Enqueue: wait for another stream's event, given as its CUDA handle."""
        ...

    def release_to(self, stream: int) -> None:
        """Let another stream, given as its CUDA handle, wait for everything enqueued here so far."""
        ...
