"""Choose the kernels for a device."""

from __future__ import annotations

import functools
import logging

import numpy as np

from dgc.core.kernels.base import PIECE, Kernels, SegmentWork
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.kernels.threshold import new_thresholds
from dgc.errors import ConfigError

logger = logging.getLogger("dgc")

DEVICES = ("cpu", "gpu")


@functools.cache
def choose_kernels(device: str = "cpu") -> Kernels:
    """Return the backend for arrays on ``device``, compiled and tested; one object per process and device.

    Args:
        device: "cpu", "gpu" for the first GPU, or "gpu:1" for the second one.

    Raises:
        ArithmeticError: the backend computes a wrong result in a small test step.
        ConfigError: the device is unknown, or its GPU backend does not work here; the message says why.
    """
    kind, _, number = device.partition(":")
    if kind not in DEVICES or (number and (kind == "cpu" or not number.isdecimal())):
        raise ConfigError(f"there are no kernels for device {device!r}; allowed: {', '.join(DEVICES)}")
    kernels = _gpu_kernels(int(number or 0)) if kind == "gpu" else _cpu_kernels()
    logger.info("compression runs on %s", kernels.describe())
    return kernels


def _cpu_kernels() -> Kernels:
    from dgc.core.kernels.compile import compiling
    from dgc.core.kernels.cpu import NumbaKernels

    kernels = NumbaKernels()
    with compiling("cpu"):
        _try_out(kernels)
    return kernels


def _try_out(kernels: Kernels) -> None:
    """Compare one small step with the reference."""
    n = 70_000  # enough for every kernel
    values = np.sin(np.arange(n, dtype=np.float32))
    outcomes = []
    for each in (kernels, ReferenceKernels()):
        memory = each.memory
        gradient, u, v = (memory.zeros(n, np.float32) for _ in range(3))
        for array in (gradient, u, v):
            memory.copy_in(array, values)
        work = [SegmentWork(gradient, None, 0, n, k=50, momentum=0.9)]
        chosen = each.accumulate_and_select(work, u, v, new_thresholds(1))
        if not kernels.on_device:  # a device's arrays here are CuPy's; in a training they are the framework's
            scales = np.linspace(1, 2, -(-n // PIECE), dtype=np.float32)
            each.take_update(gradient, u, v, 1 / scales, scales, 0.25)
            each.put(u, gradient, v, 1 / scales)
        outcomes.append((memory.to_host(u), memory.to_host(v), chosen.positions, memory.to_host(gradient)))
    if not all(np.array_equal(ours, theirs) for ours, theirs in zip(*outcomes, strict=True)):
        raise ArithmeticError("a step gave another result than the reference")


def _gpu_kernels(number: int) -> Kernels:
    try:
        from dgc.core.kernels.gpu import CupyKernels, device_count

        if number >= device_count():
            raise ConfigError(f"there is no GPU {number}: this process sees {device_count()}")
        kernels = CupyKernels(number)
        _try_out(kernels)
        return kernels
    except ConfigError:
        raise
    except Exception as error:  # no CuPy, no driver, no compiler
        raise ConfigError(
            f"no GPU kernels can be used here ({type(error).__name__}: {error}); install cupy-cuda12x or cupy-cuda13x "
            "and a driver, or let the gradients pass through the host"
        ) from error
