"""What a rank runs that lives as long as the test session: it takes cases from ``rank_jobs`` until told to end."""

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import worker_tools
from rank_reset import Beginning


class Server:
    """Runs what the test process asks for on this rank."""

    def __init__(self, beginning: Beginning) -> None:
        self._beginning = beginning
        self._worker: Path | None = None
        self._folder = Path(__file__).parent

    def serve(self, request: dict[str, Any]) -> bool:
        """Run one request; returns whether it ended well on this rank."""
        worker, case = Path(request["worker"]), request["case"]
        if case is None:
            self._worker = None
            return self._run_script(worker, request["args"])
        if worker != self._worker and not self._import(worker, case):
            return False
        return worker_tools.run_case(case)

    def _import(self, path: Path, case: str) -> bool:
        self._worker = None
        try:
            self._begin(path, [])
            worker_tools.load(path)
        except Exception:
            text = f"importing {path.name} failed\n{traceback.format_exc()}"
            worker_tools.report({"case": case, "outcome": "failed", "traceback": text})
            return False
        self._worker = path
        return True

    def _run_script(self, path: Path, args: list[str]) -> bool:
        server = sys.modules["__main__"]
        try:
            self._begin(path, args)
            sys.path.insert(0, str(path.parent))
            # Under the name that a script has, also for pickle.
            module = sys.modules["__main__"] = types.ModuleType("__main__")
            module.__file__ = str(path)
            exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), module.__dict__)
        except Exception:
            traceback.print_exc()
            return False
        finally:
            sys.modules["__main__"] = server
        return True

    def _begin(self, path: Path, args: list[str]) -> None:
        worker_tools.forget_cases()
        self._beginning.restore(self._folder)
        self._folder = path.parent
        sys.argv = [str(path), *args]


def _import_framework(name: str) -> None:
    """Before the first worker, so that it is among what ``rank_reset`` leaves out of garbage collections."""
    if name == "tensorflow":
        # Keras has wrappers for these, and importing them takes a third of its time.
        unneeded = {"sklearn", "matplotlib"} - set(sys.modules)
        sys.modules.update(dict.fromkeys(unneeded))  # type: ignore[arg-type]
        tensorflow = importlib.import_module(name)
        for module in unneeded:
            del sys.modules[module]
        # One thread for each rank, chosen before the first worker computes: later TensorFlow refuses to.
        tensorflow.config.threading.set_intra_op_parallelism_threads(1)
        tensorflow.config.threading.set_inter_op_parallelism_threads(1)
    elif name != "none":
        importlib.import_module(name)


def order_exit_handlers() -> None:
    """The Horovod that was initialised first, TensorFlow's if both were, shuts down last: it finalizes MPI."""
    for framework in ("tensorflow", "torch"):
        if f"horovod.{framework}.mpi_ops" in sys.modules:
            _move_to_front(sys.modules[f"horovod.{framework}.mpi_ops"]._basics.shutdown)
    package = sys.modules.get("dgc.transport.mpi")
    if package is not None and package._farewells:
        _move_to_front(package.leave)


def _move_to_front(handler: Callable[[], None]) -> None:
    atexit.unregister(handler)
    atexit.register(handler)


@contextlib.contextmanager
def _written_to(folder: Path) -> Iterator[None]:
    """Send stdout and stderr to the request's files, that of libraries and of ``faulthandler`` too."""
    usual = {1: os.dup(1), 2: os.dup(2)}
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / f"{name}{worker_tools.launch_rank()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, copy in usual.items():
            os.dup2(copy, number)
            os.close(copy)


def _end_with_launcher() -> None:
    """Let the kernel end this rank when its launcher is gone; between requests it is stopped, and could not do it."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main() -> None:
    """Take requests until "end", or until the test process is gone; then leave as a script does that has ended."""
    _end_with_launcher()
    _import_framework(os.environ["DGC_TEST_FRAMEWORK"])
    # The test process asks with this signal where a rank hangs; after an abort, the threads are written as well.
    faulthandler.register(signal.SIGUSR1)
    faulthandler.enable()
    connection = socket.create_connection(("127.0.0.1", int(os.environ["DGC_TEST_PORT"])), timeout=600)
    connection.settimeout(None)
    stream = connection.makefile("rw")

    def say(message: dict[str, Any]) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    say({"key": os.environ["DGC_TEST_KEY"], "rank": worker_tools.launch_rank(), "pid": os.getpid()})
    server = Server(Beginning())
    for line in stream:
        request = json.loads(line)
        if "worker" not in request:
            break
        worker_tools.REPORTS = request["folder"]
        with _written_to(Path(request["folder"])):
            good = server.serve(request)
        say({"number": request["number"], "good": good})
    order_exit_handlers()


if __name__ == "__main__":
    main()
