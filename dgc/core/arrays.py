"""Which backend does the work on which device, and why: the one place that decides it."""

from __future__ import annotations

import functools
import logging

from dgc.core.errors import ConfigError
from dgc.core.kernels.base import Kernels
from dgc.core.kernels.reference import ReferenceKernels

logger = logging.getLogger("dgc")

DEVICES = ("cpu",)


@functools.cache
def choose_kernels(device: str = "cpu") -> Kernels:
    """The fastest backend that works here for arrays on ``device``; the same object for every caller of a process.

    On a CPU that is Numba. Where Numba cannot be imported the NumPy reference does the same work, about ten times
    slower, and one warning in the log "dgc" says so.

    Raises:
        ConfigError: an unknown device.
    """
    if device not in DEVICES:
        raise ConfigError(f"there are no kernels for device {device!r}; allowed: {', '.join(DEVICES)}")
    try:
        from dgc.core.kernels.cpu import NumbaKernels
    except ImportError as error:
        logger.warning(
            "compression runs on NumPy alone, about ten times slower, because Numba cannot be imported (%s); "
            "pip install numba",
            error,
        )
        return ReferenceKernels()
    kernels = NumbaKernels()
    logger.info("compression runs on %s", kernels.describe())
    return kernels


def describe_backend(device: str = "cpu") -> str:
    """One line that says which backend :func:`choose_kernels` takes, and on how many threads."""
    kernels = choose_kernels(device)
    describe = getattr(kernels, "describe", None)
    return describe() if describe is not None else f"numpy ({kernels.name})"
