"""Dense tensors as the kernels of dense.cu take them: many in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dgc.core.errors import LayoutError
from dgc.core.kernels.device_tables import TENSOR, Geometry, element_code, momentum_form


@dataclass(slots=True)
class DenseTensor:
    """One tensor's part in a launch. What an operation does not need stays as it is.

    ``result``, ``gradient`` and ``parameter`` are (length,) device arrays; ``u`` and ``vector`` are the places where
    the tensor begins in the momentum buffer and in the vector of means.
    """

    result: Any = None
    gradient: Any = None
    parameter: Any = None
    u: int = 0
    vector: int = -1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    scale: float = 1.0
    limit: float | None = None

    @property
    def length(self) -> int:
        """Elements."""
        return (self.result if self.gradient is None else self.gradient).size


def tensor_table(
    tensors: Sequence[DenseTensor], geometry: Geometry, bits: int, address: Callable[[Any], int]
) -> np.ndarray:
    """Return the (T,) TENSOR table of one launch.

    Args:
        tensors: T of them.
        geometry: of their lengths.
        bits: 32 or 64, the type of results, means and momentum.
        address: the runtime's function from device array to address.

    Raises:
        LayoutError: an array is not what a kernel may touch.
    """
    rows = []
    for t, first in zip(tensors, geometry.first_tile.tolist(), strict=True):
        if t.result is not None and (8 * t.result.dtype.itemsize != bits or not t.result.flags.c_contiguous):
            raise LayoutError(f"a result is {t.result.dtype}; it must be contiguous float{bits}")
        rows.append(
            (
                0 if t.result is None else address(t.result),
                0 if t.gradient is None else address(t.gradient),
                0 if t.parameter is None else address(t.parameter),
                t.u,
                t.vector,
                t.length,
                t.momentum,
                t.weight_decay,
                t.scale,
                np.inf if t.limit is None else t.limit,
                0 if t.gradient is None else element_code(t.gradient, t.length, "gradient"),
                0 if t.parameter is None else element_code(t.parameter, t.length, "parameter"),
                momentum_form(t.momentum, t.nesterov),
                first,
            )
        )
    return np.array(rows, TENSOR)
