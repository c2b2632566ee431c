"""How many threads the kernels use, and whether they may use more than one at all."""

from __future__ import annotations

import logging
import os
import threading

import numba

from dgc.core.errors import ConfigError
from dgc.core.kernels.jit import entry

logger = logging.getLogger(__name__)

THREADS_VARIABLE = "DGC_NUM_THREADS"
LOCAL_SIZE_VARIABLES = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE")
"""Where launchers say how many ranks share this host, the first that is set counts."""

_lock = threading.Lock()


def available_cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def default_threads(local_size: int | None = None) -> int:
    """The process's share of its host: cores // ranks on this host, at least 1.

    Args:
        local_size: ranks on this host; None asks the environment that the launcher set.

    Raises:
        ConfigError: DGC_NUM_THREADS is set and is not a whole number >= 1.
    """
    wanted = os.environ.get(THREADS_VARIABLE)
    if wanted is not None:
        if not wanted.isdecimal() or int(wanted) < 1:
            raise ConfigError(f"{THREADS_VARIABLE} is {wanted!r}; allowed: a whole number >= 1")
        return int(wanted)
    if local_size is None:
        found = next((os.environ[name] for name in LOCAL_SIZE_VARIABLES if name in os.environ), "1")
        local_size = int(found) if found.isdecimal() else 1
    return max(1, available_cores() // max(1, local_size))


def _count(parts, out):
    for part in numba.prange(parts):
        out[part] += 1


_count_together = entry(parallel=True)(_count)


def threading_layer() -> str | None:
    """Name of the threading layer that Numba runs on, if two Python threads may use it at once; else None.

    Numba decides on one layer per process, at the first parallel kernel, and its own fallback ``workqueue`` aborts
    the process when two threads enter it. So a safe one is asked for before that, and an unsafe one never entered.
    """
    import numpy as np

    with _lock:
        try:
            layer = numba.threading_layer()
        except ValueError:  # none has been chosen yet
            before = numba.config.THREADING_LAYER
            if before == "workqueue":
                return None
            if before == "default":
                numba.config.THREADING_LAYER = "threadsafe"
            try:
                _count_together(2, np.zeros(2, np.int64))
            except (ValueError, ImportError, OSError) as error:
                logger.debug("no thread-safe threading layer: %s", error)
                return None
            finally:
                numba.config.THREADING_LAYER = before
            layer = numba.threading_layer()
    return layer if layer != "workqueue" else None
