"""Ranks that live as long as the test session: the fixture ``ranks`` hands them cases and scripts."""

import ast
import contextlib
import ctypes
import json
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from launch_tools import (
    DEFAULT_TIMEOUT,
    LaunchError,
    Result,
    case_kinds,
    check_case,
    environment_for,
    kill_tree,
    launch_command,
    read_reports,
    require,
    script_path,
    start_job,
)

SERVER = Path(__file__).with_name("rank_server.py")

LIVING = 6
"""Most jobs at a time. Ranks of TensorFlow take 0.7 GB each; the job that was not used for the longest time ends."""

PATIENCE = 60.0
"""Seconds that ranks get to end a case after another rank has failed or ended in it: they may wait for it for ever."""

START_SECONDS = 600.0
END_SECONDS = 300.0

ENVIRONMENT = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3600"}
SHARED = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
"""For ranks that several workers share; Horovod's thread does not idle then."""
TENSORFLOW = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "TF_USE_LEGACY_KERAS": "0"}

FLAVOURS = {"keras3": {"TF_USE_LEGACY_KERAS": "0"}, "legacy": {"TF_USE_LEGACY_KERAS": "1"}}
"""Environments for Keras 3 and for legacy Keras."""

SIZES = {"2ranks": {"n": 2}, "4ranks": {"n": 4}}
CARRIERS = {"mpirun": {"launcher": "mpirun"}, "gloo": {"launcher": "gloo"}}
TORCHRUN = {"torchrun": {"launcher": "torchrun"}}
KERAS = {flavour: {"env": env} for flavour, env in FLAVOURS.items()}
"""Kinds of ranks for :func:`each_case`."""


_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Kind:
    """What tells jobs apart."""

    framework: str
    size: int
    launcher: str
    env: tuple[tuple[str, str], ...]
    own: Path | None = None
    """The worker that gets ranks of its own, because it declares FRESH."""


class Job:
    """Living ranks. They are stopped between requests, because Horovod's threads would go on talking to each other."""

    def __init__(self, kind: Kind) -> None:
        self.size = kind.size
        self.history: list[str] = []
        self._folder = tempfile.TemporaryDirectory(prefix="dgc-ranks-")
        self._requests = 0
        self._gone = False
        self._sockets: dict[int, socket.socket] = {}
        self._pids: dict[int, int] = {}
        self._buffers = dict.fromkeys(range(kind.size), b"")
        command = [*launch_command(kind.launcher, kind.size), sys.executable, str(SERVER)]
        self._command = " ".join(command)
        key = secrets.token_hex(16)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            own = {
                "DGC_TEST_PORT": str(listener.getsockname()[1]),
                "DGC_TEST_KEY": key,
                "DGC_TEST_FRAMEWORK": kind.framework,
            }
            environment = environment_for({**ENVIRONMENT, **({} if kind.own else SHARED), **dict(kind.env), **own})
            self._process = start_job(command, Path(self._folder.name), environment, _end_with_parent)
            try:
                self._welcome(listener, key)
            except BaseException:
                self.kill()
                self._folder.cleanup()
                raise

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        return bool(self._sockets)

    def run(self, script: Path | str, args: list[str], case: str | None, timeout: float) -> tuple[Result, bool]:
        """Run one case or one script on all ranks; returns what came of it, and whether all ranks ended it well."""
        self._requests += 1
        folder = Path(self._folder.name) / str(self._requests)
        folder.mkdir()
        path = script_path(script, folder)
        start = time.monotonic()
        request = {"number": self._requests, "worker": str(path), "args": args, "case": case, "folder": str(folder)}
        line = (json.dumps(request) + "\n").encode()
        try:
            self._signal(signal.SIGCONT)
            for connection in self._sockets.values():
                connection.sendall(line)
            good, timed_out = self._wait(timeout)
        except OSError:
            good, timed_out = False, False
        except BaseException:
            self.kill()
            raise
        ending = None
        if good:
            self._signal(signal.SIGSTOP)
        else:
            ending = self.kill()
        result = Result(
            returncode=0 if good else ending or 1,
            reports=[read_reports(folder / f"rank{rank}.jsonl") for rank in range(self.size)],
            stdout=self._written(folder, "stdout", good),
            stderr=self._written(folder, "stderr", good),
            seconds=time.monotonic() - start,
            timed_out=timed_out,
            command=f"{self._command} {path.name} {case or ''}".rstrip() + self._before(),
        )
        self.history.append(f"{path.name} {case or ''}".rstrip())
        if not good:
            self._folder.cleanup()
        return result, good

    def leave(self) -> None:
        """Let all ranks leave together, as a script does that has ended; :meth:`end` waits for them."""
        self._signal(signal.SIGCONT)
        for connection in self._sockets.values():
            connection.sendall(b"{}\n")

    def end(self) -> None:
        """Wait for ranks that leave."""
        if not self.alive:
            return
        try:
            returncode: int | None = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            returncode = None
        stderr = self._written(Path(self._folder.name), "stderr", good=True)
        self.kill()
        self._folder.cleanup()
        if returncode != 0:
            ending = "did not end" if returncode is None else f"ended with {returncode}"
            raise LaunchError(f"`{self._command}` {ending}{self._before()}\n{stderr[-8000:]}")

    def kill(self) -> int | None:
        for connection in self._sockets.values():
            connection.close()
        self._sockets.clear()
        if self._gone:
            # The launcher notices, and ends the others; a signal in the middle of that crashes it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        if self._process.poll() is None:
            kill_tree(self._process)
        return self._process.returncode

    def _welcome(self, listener: socket.socket, key: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        listener.settimeout(0.2)
        while len(self._sockets) < self.size:
            if self._process.poll() is not None or time.monotonic() > deadline:
                written = self._written(Path(self._folder.name), "stderr", good=True)
                raise LaunchError(f"`{self._command}` did not start its ranks\n{written[-8000:]}")
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(START_SECONDS)
            hello = json.loads(connection.makefile().readline() or "{}")
            if hello.get("key") == key:
                self._sockets[hello["rank"]] = connection
                self._pids[hello["rank"]] = hello["pid"]

    def _wait(self, timeout: float) -> tuple[bool, bool]:
        """Wait until all ranks are done; returns whether all are, and well, and whether time ran out first."""
        deadline = time.monotonic() + timeout
        waiting, good, limit = set(self._sockets), True, deadline
        while waiting and time.monotonic() < limit:
            ready, _, _ = select.select([self._sockets[r] for r in waiting], [], [], min(1.0, timeout))
            for rank in [r for r in waiting if self._sockets[r] in ready]:
                answer = self._answer(rank)
                if answer is not None:
                    waiting.discard(rank)
                    if not answer:
                        good, limit = False, min(deadline, time.monotonic() + PATIENCE)
        if waiting:
            self._signal(signal.SIGUSR1, waiting)  # so that they write the stacks of their threads
            time.sleep(0.5)
        return good and not waiting, bool(waiting) and good

    def _answer(self, rank: int) -> bool | None:
        """Whether this rank ended the request well; None before it has said so. A rank that is gone did not."""
        try:
            data = self._sockets[rank].recv(65536)
        except OSError:
            data = b""
        if not data:
            self._gone = True
            return False
        self._buffers[rank] += data
        line, newline, rest = self._buffers[rank].partition(b"\n")
        if not newline:
            return None
        self._buffers[rank] = rest
        return bool(json.loads(line)["good"])

    def _signal(self, number: signal.Signals, ranks: Iterable[int] | None = None) -> None:
        for rank in self._pids if ranks is None else ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(self._pids[rank]).send_signal(number)

    def _written(self, folder: Path, name: str, good: bool) -> str:
        """What the ranks wrote to stdout or stderr, and if they went down, what the launcher has to say."""
        parts = [path.read_text(errors="replace") for path in sorted(folder.glob(f"{name}*"))]
        if not good:
            parts.append((Path(self._folder.name) / name).read_text(errors="replace"))
        return "".join(parts)

    def _before(self) -> str:
        ran = ", ".join(self.history[-10:])
        return f" (after {len(self.history)} others: {ran})" if ran else ""


def _end_with_parent() -> None:
    """A test process that is killed leaves no ranks behind: the kernel then ends the launcher."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        _LIBC.prctl(pr_set_pdeathsig, signal.SIGTERM)


@dataclass(frozen=True)
class Cases:
    """The cases of a worker on one number of ranks; each runs when a test asks for it."""

    ranks: "Ranks"
    worker: Path
    kind: Kind
    timeout: float

    def check(self, name: str) -> None:
        """Fail the test unless case ``name`` passes on every rank; skip it if a rank skips it."""
        result, _ = self.ranks.job(self.kind).run(self.worker, [], name, self.timeout)
        check_case(result, name)


class Ranks:
    """The fixture ``ranks``: all living jobs of the session."""

    def __init__(self) -> None:
        self._jobs: dict[Kind, Job] = {}
        self._errors: list[str] = []

    def __call__(
        self,
        worker: Path,
        n: int,
        launcher: str = "mpirun",
        env: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Cases:
        """The cases of a worker on ``n`` ranks."""
        require(launcher)
        return Cases(self, worker, _kind(worker.read_text(), n, launcher, env, worker), timeout)

    def run(
        self,
        script: Path | str,
        n: int,
        *args: Any,
        launcher: str = "mpirun",
        env: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        check: bool = True,
    ) -> Result:
        """Run a script, or its source, on living ranks; otherwise as ``launch_tools.run_mpi``."""
        require(launcher)
        source = script.read_text() if isinstance(script, Path) else script
        job = self.job(_kind(source, n, launcher, env))
        result, good = job.run(script, list(map(str, args)), None, timeout)
        if check and not good:
            raise LaunchError(result.explain())
        return result

    def job(self, kind: Kind) -> Job:
        """The living job of this kind, started if there is none."""
        job = self._jobs.pop(kind, None)
        self._end([other for other in self._jobs if other.own])
        if job is None or not job.alive:
            # Dictionaries keep their order: the first one is the one that was not used for the longest time.
            self._end(list(self._jobs)[: max(0, len(self._jobs) - LIVING + 1)])
            job = Job(kind)
        self._jobs[kind] = job
        return job

    def close(self) -> None:
        self._end(list(self._jobs))
        if self._errors:
            raise LaunchError("\n".join(self._errors))

    def _end(self, kinds: Iterable[Kind]) -> None:
        ending = [self._jobs.pop(kind) for kind in kinds]
        for job in ending:
            with contextlib.suppress(OSError):
                job.leave()
        for job in ending:
            try:
                job.end()
            except (LaunchError, OSError) as error:
                job.kill()
                # Not an error of the test that needs the place.
                self._errors.append(str(error))


def once(values: Iterable[Any]) -> list[Any]:
    """Parameters of which the first one is in every run, and the others belong to the matrix."""
    first, *others = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*first), *(pytest.param(*value, marks=pytest.mark.matrix) for value in others)]


def each_case(
    worker: Path,
    kinds: Mapping[str, Mapping[str, Any]] | None = None,
    more: Iterable[str] = (),
    beyond: Iterable[str] = (),
) -> Callable[..., None]:
    """A test of each case of a worker, on 2 ranks if nothing else is said; of those ``beyond`` in the matrix only."""
    kinds = kinds or {"2ranks": {}}

    @pytest.mark.mpi
    @pytest.mark.parametrize(("kind", "name"), _rows(worker, kinds, more, beyond))
    def test(ranks: Ranks, kind: str, name: str) -> None:
        ranks(worker, **{"n": 2, **kinds[kind]}).check(name)

    return test


def _rows(worker: Path, kinds: Iterable[str], more: Iterable[str], beyond: Iterable[str]) -> list[Any]:
    cases = {**dict.fromkeys(more, ()), **case_kinds(worker)}
    unknown = {kind for named in cases.values() for kind in named} - set(kinds)
    if unknown:
        raise ValueError(f"{worker.name}: a case names {sorted(unknown)}; the test has {list(kinds)}")
    if missing := set(beyond) - set(cases):
        raise ValueError(f"{worker.name} has no case {sorted(missing)}")
    first = next(iter(kinds))

    def marks(kind: str, name: str, named: Iterable[str]) -> list[Any]:
        return [] if kind in (named or [first]) and name not in beyond else [pytest.mark.matrix]

    return [
        pytest.param(kind, name, id=f"{kind}-{name}", marks=marks(kind, name, named))
        for kind in kinds
        for name, named in cases.items()
        if kind in (named or kinds)
    ]


def _kind(source: str, n: int, launcher: str, env: Mapping[str, str] | None, worker: Path | None = None) -> Kind:
    names, fresh = _facts(source)
    # TensorFlow's ranks also take scripts that import both.
    framework = next((name for name in ("tensorflow", "torch") if name in names), "none")
    settings = {**(TENSORFLOW if framework == "tensorflow" else {}), **(env or {})}
    return Kind(framework, n, launcher, tuple(sorted(settings.items())), worker if fresh else None)


@cache
def _facts(source: str) -> tuple[set[str], bool]:
    """The parts of the names of what a script imports, and whether it declares FRESH; without running it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(node.module.split("."))
    return names, any(line.startswith("FRESH = ") for line in source.splitlines())
