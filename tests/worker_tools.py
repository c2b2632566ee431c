"""What a worker of a multi-rank test imports; as a script, ``worker_tools.py FILE [CASE...]``, it runs the cases."""

import faulthandler
import importlib
import importlib.util
import itertools
import json
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "RANK")
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE", "WORLD_SIZE")

_cases: dict[str, Callable[[], None]] = {}
REPORTS = os.environ.get("DGC_TEST_REPORTS")
"""The folder of what cases report; a rank that lives gets one with each request."""

OPENED: list[Any] = []
"""What is closed when the case has passed."""


class SkipCase(Exception):
    """Raised by a case that cannot run here; raise it on every rank."""


def launch_rank() -> int:
    """This process' rank according to the launcher, known before any library is initialised."""
    return int(next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0"))


def launch_size() -> int:
    """Number of ranks according to the launcher."""
    return int(next((os.environ[name] for name in _SIZE_VARIABLES if name in os.environ), "1"))


def report(value: Any) -> None:
    """Hand a value to the test, as ``Result.reports[rank]``. NumPy arrays and scalars become lists and numbers."""
    line = json.dumps(value, default=_plain)
    if REPORTS is None:
        print(f"rank {launch_rank()}: {line}", flush=True)
        return
    with (Path(REPORTS) / f"rank{launch_rank()}.jsonl").open("a") as file:
        file.write(line + "\n")


def case(function: Callable[..., None] | str | None = None, *kinds: str, **parameters: Any) -> Callable[..., Any]:
    """Register a function as a case for each combination of the parameters' values, in the order of the file."""
    if not callable(function):
        return partial(case, **parameters)
    if function.__module__ == "__main__":
        sys.exit(f"this would run no case; call python tests/worker_tools.py {sys.argv[0]}")
    for name, arguments in combinations(function.__name__, parameters):
        _cases[name] = partial(function, **arguments)
    return function


def combinations(name: str, parameters: Mapping[str, Iterable[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The cases that a function makes: (name, arguments)."""
    for values in itertools.product(*parameters.values()):
        yield "-".join([name, *map(str, values)]), dict(zip(parameters, values, strict=True))


def uneven_batches(gap: int, rank: int | None = None) -> int:
    """Number of a rank's batches: at least 3, each rank ``gap`` more than the one before; the last but one the most."""
    size, rank = launch_size(), launch_rank() if rank is None else rank
    return 3 + gap * [*range(size - 2), size - 1, size - 2].index(rank)


def warned(function: Callable[[], object], match: str) -> int:
    """Return how many warnings that match ``function`` causes here, also those that are told once in a process."""
    from dgc.adapter.checks import warn_once  # not every worker loads the package

    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        function()
    return sum(bool(re.search(match, str(w.message))) for w in seen)


def close_later(opened: Any) -> Any:
    """Close it when the case has passed; returns it."""
    OPENED.append(opened)
    return opened


def main() -> None:
    """Run all cases of a worker, or those named after it, and report each one's outcome on this rank."""
    path, *names = sys.argv[1:]
    load(Path(path).resolve())
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    for name in names or list(_cases):
        run_case(name)


def load(path: Path) -> None:
    """Import a worker, which registers its cases, and initialise what it needs."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    initialise_horovod()


def initialise_horovod() -> None:
    """Once for each framework whose adapter the workers have asked for so far; under torchrun, not at all."""
    for framework in ("torch", "tensorflow") if "TORCHELASTIC_RUN_ID" not in os.environ else ():
        if any(f"{package}.{framework}" in sys.modules for package in ("dgc", "horovod")):
            horovod = importlib.import_module(f"horovod.{framework}")
            # Not again: that would register Horovod's exit handler again, and move it before the package's own.
            if not horovod.is_initialized():
                horovod.init()


def run_case(name: str) -> bool:
    """Run one case, report its outcome on this rank, and return whether it passed or was skipped."""
    report({"case": name, "outcome": "started"})
    OPENED.clear()
    try:
        _cases[name]()
        for opened in OPENED:
            opened.close()
    except SkipCase as reason:
        report({"case": name, "outcome": "skipped", "reason": str(reason)})
    except Exception:
        report({"case": name, "outcome": "failed", "traceback": traceback.format_exc()})
        return False
    else:
        report({"case": name, "outcome": "passed"})
    return True


def forget_cases() -> None:
    """Before another worker is imported into this process."""
    _cases.clear()
    OPENED.clear()


def _dump_where_it_hangs() -> None:
    """Write all threads' stacks to stderr shortly before the test will kill this job."""
    moment = os.environ.get("DGC_TEST_DUMP_AT")
    if moment is not None:
        faulthandler.dump_traceback_later(max(0.1, float(moment) - time.monotonic()))


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


_dump_where_it_hangs()

if __name__ == "__main__":
    importlib.import_module("worker_tools").main()  # the module that workers import
