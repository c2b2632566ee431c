"""What one worker may leave behind on a living rank, and how the next one finds it as on a fresh rank."""

import gc
import os
import random
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
KEPT_MODULES = {"__main__", "rank_reset", "worker_tools"}


def restore_environment(saved: Mapping[str, str]) -> None:
    """Write what has changed, which is mostly nothing: a library's thread may read the environment at the same time."""
    for name in set(os.environ) - set(saved):
        del os.environ[name]
    for name, value in saved.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


class Beginning:
    """The state of this process before its first worker."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._folder = Path.cwd()
        self._path = list(sys.path)
        self._hook = sys.excepthook
        self._warnings = list(warnings.filters)

    def restore(self, folder: Path) -> None:
        """Put everything back. Collective where a worker has added process sets, so to be called on all ranks."""
        restore_environment(self._environment)
        os.chdir(self._folder)
        sys.path[:] = self._path
        sys.excepthook = self._hook
        self._restore_warnings()
        _forget_modules(folder)
        gc.enable()
        gc.unfreeze()
        gc.collect()
        # Libraries have a million objects, which every collection within a case would go through.
        gc.freeze()
        random.seed(0)
        if "numpy" in sys.modules:
            _restore_numpy(sys.modules["numpy"])
        if "torch" in sys.modules:
            _restore_torch(sys.modules["torch"])
        if "tensorflow" in sys.modules:
            _restore_tensorflow(sys.modules["tensorflow"])
        for adapter in ("horovod.torch", "horovod.tensorflow"):
            if adapter in sys.modules:
                _remove_process_sets(sys.modules[f"{adapter}.mpi_ops"]._basics)

    def _restore_warnings(self) -> None:
        # Entering and leaving makes Python forget which warnings it has shown.
        with warnings.catch_warnings():
            pass
        warnings.filters[:] = self._warnings
        # So do the package's own warnings, of which each comes once a process.
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "dgc":
                for key, value in vars(module).items():
                    if "warn" in key and hasattr(value, "cache_clear"):
                        value.cache_clear()


def _forget_modules(folder: Path) -> None:
    """Workers and what they share: two folders have modules of one name, and modules may keep state."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name in KEPT_MODULES or path is None:
            continue
        if Path(path).is_relative_to(TESTS) or Path(path).is_relative_to(folder):
            del sys.modules[name]


def _restore_numpy(numpy: Any) -> None:
    numpy.random.seed(0)
    numpy.seterr(divide="warn", over="warn", under="ignore", invalid="warn")


def _restore_torch(torch: Any) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    # As OMP_NUM_THREADS says.
    torch.set_num_threads(1)


def _restore_tensorflow(tensorflow: Any) -> None:
    keras = tensorflow.keras
    keras.backend.clear_session()
    keras.backend.set_floatx("float32")
    precision = keras.mixed_precision
    (getattr(precision, "set_dtype_policy", None) or precision.set_global_policy)("float32")
    tensorflow.config.run_functions_eagerly(False)
    tensorflow.random.set_seed(0)


def _remove_process_sets(basics: Any) -> None:
    if basics.is_initialized() and os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1":
        for number in sorted(basics._get_process_set_ids_and_ranks()):
            if number != 0:
                basics._remove_process_set_impl(number)
