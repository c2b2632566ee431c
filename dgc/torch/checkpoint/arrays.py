"""A compressor's state as a file of torch holds it: tensors in the place of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def to_tensors(value: Any) -> Any:
    """Replace arrays by tensors, so that the file loads with ``weights_only=True``."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {k: to_tensors(v) for k, v in value.items()}
    return value


def to_arrays(value: Any) -> Any:
    """The inverse of :func:`to_tensors`."""
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {k: to_arrays(v) for k, v in value.items()}
    return value
