"""Start real multi-rank jobs from tests, and read back what each rank found."""

import ast
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from worker_tools import combinations

TESTS = Path(__file__).resolve().parent
REPOSITORY = TESTS.parent
BIN = Path(sys.executable).parent

DEFAULT_TIMEOUT = 300.0
"""Seconds after which a job counts as hung: many times what any takes, since a loaded machine is no failure."""


class LaunchError(AssertionError):
    """A job did not end well; the message holds what all ranks wrote."""


@dataclass(frozen=True)
class Result:
    """One finished job."""

    returncode: int
    """Exit status of the launcher; negative if a signal ended it."""
    reports: list[list[Any]]
    """For each rank, everything it gave to ``worker_tools.report``, in order."""
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool
    command: str

    @property
    def values(self) -> list[Any]:
        """The last report of each rank; None for a rank that reported nothing."""
        return [reports[-1] if reports else None for reports in self.reports]

    def explain(self) -> str:
        """Everything there is to know about a failure."""
        ending = "timed out" if self.timed_out else f"returned {self.returncode}"
        return (
            f"`{self.command}` {ending} after {self.seconds:.1f} s\n"
            f"---- stdout ----\n{self.stdout[-8000:]}\n---- stderr ----\n{self.stderr[-16000:]}"
        )


def require(launcher: str) -> None:
    """Skip the calling test unless ``launcher`` is installed."""
    program = {"mpirun": "mpirun", "horovodrun": "horovodrun", "gloo": "horovodrun"}.get(launcher)
    if program is not None and shutil.which(program, path=_search_path()) is None:
        pytest.skip(f"{program} is not installed")
    if launcher not in ("mpirun", "torchrun") and importlib.util.find_spec("horovod") is None:
        pytest.skip("horovod is not installed")


def run_mpi(
    np: int,
    script: Path | str,
    *args: Any,
    launcher: str = "mpirun",
    timeout: float = DEFAULT_TIMEOUT,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> Result:
    """Run a script on ``np`` ranks of this machine."""
    require(launcher)
    with tempfile.TemporaryDirectory(prefix="dgc-launch-") as folder:
        path = script_path(script, Path(folder))
        command = [*launch_command(launcher, np), sys.executable, str(path), *map(str, args)]
        # A little before we kill it, each rank writes where it hangs. As a time of the machine's clock, since ranks
        # on a busy machine start much later than their launcher.
        moments = {"DGC_TEST_REPORTS": folder, "DGC_TEST_DUMP_AT": str(time.monotonic() + timeout * 0.9)}
        start = time.monotonic()
        process = start_job(command, Path(folder), environment_for({**moments, **(env or {})}))
        timed_out = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            if process.returncode is None:
                kill_tree(process)
        result = Result(
            returncode=process.returncode,
            reports=[read_reports(Path(folder) / f"rank{rank}.jsonl") for rank in range(np)],
            stdout=(Path(folder) / "stdout").read_text(errors="replace"),
            stderr=(Path(folder) / "stderr").read_text(errors="replace"),
            seconds=time.monotonic() - start,
            timed_out=timed_out,
            command=" ".join(command),
        )
    if check and (result.returncode != 0 or result.timed_out):
        raise LaunchError(result.explain())
    return result


def start_job(
    command: list[str], folder: Path, environment: Mapping[str, str], prepare: Callable[[], None] | None = None
) -> subprocess.Popen[bytes]:
    """Start a launcher that writes to files in ``folder``; ``prepare`` is called in its process."""
    # Files, not pipes: a forgotten grandchild that keeps a pipe open would keep us reading.
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            cwd=REPOSITORY,
            start_new_session=True,
            preexec_fn=prepare,
        )


def check_case(result: Result, name: str) -> None:
    """Fail the test unless case ``name`` passed on every rank; skip it if a rank skipped it."""
    latest: list[dict[str, Any]] = []
    for reports in result.reports:
        entries = [entry for entry in reports if isinstance(entry, dict) and entry.get("case") == name]
        latest.append(entries[-1] if entries else {"outcome": "started"})
    outcomes = [entry["outcome"] for entry in latest]
    parts = [
        f"case {name!r} failed on rank {rank}:\n{entry['traceback']}"
        for rank, entry in enumerate(latest)
        if entry["outcome"] == "failed"
    ]
    if "started" in outcomes:
        unfinished = [rank for rank, outcome in enumerate(outcomes) if outcome == "started"]
        parts.append(f"case {name!r} did not finish on ranks {unfinished}\n{result.explain()}")
    if parts:
        pytest.fail("\n".join(parts), pytrace=False)
    if "skipped" in outcomes:
        pytest.skip(latest[outcomes.index("skipped")]["reason"])


def case_kinds(script: Path) -> dict[str, tuple[str, ...]]:
    """A worker's cases and the kinds of ranks each one names, read from its source: importing it might start MPI."""
    found: dict[str, tuple[str, ...]] = {}
    module = ast.parse(script.read_text()).body
    for node in module:
        for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else []:
            called = mark if isinstance(mark, ast.Call) else ast.Call(mark, [], [])
            if isinstance(called.func, ast.Name) and called.func.id == "case":
                kinds = tuple(ast.literal_eval(argument) for argument in called.args)
                parameters = {str(word.arg): _values(word.value, module) for word in called.keywords}
                found.update((name, kinds) for name, _ in combinations(node.name, parameters))
    return found


def _values(written: ast.expr, module: list[ast.stmt]) -> list[Any]:
    """What a parameter of a case goes through: a literal, or the keys of a table of the same module."""
    if isinstance(written, ast.Name):
        tables = (n.value for n in module if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == written.id)
        table = next(tables)
        assert isinstance(table, ast.Dict), f"{written.id} is no table"
        return [ast.literal_eval(key) for key in table.keys if key is not None]
    return list(ast.literal_eval(written))


def case_names(script: Path) -> list[str]:
    return list(case_kinds(script))


def _search_path() -> str:
    return f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"


def launch_command(launcher: str, np: int) -> list[str]:
    """What starts ``np`` ranks, up to the program that they run."""
    if launcher == "single":
        return []
    if launcher == "mpirun":
        # Bound to a core each, a rank's threads could not run beside each other.
        return [_program("mpirun"), "-np", str(np), "--bind-to", "none", "--oversubscribe"]
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", f"--nproc-per-node={np}"]
    return [_program("horovodrun"), *(["--gloo"] if launcher == "gloo" else []), "-np", str(np)]


def _program(name: str) -> str:
    return shutil.which(name, path=_search_path()) or name


def environment_for(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a launcher, and of its ranks."""
    # What the caller has set for Horovod, this package or Keras is not what a test asked for; and a test process that
    # runs under a launcher itself must not hand its rank on. Ranks share the place where compiled kernels are kept.
    foreign = ("OMPI_COMM_WORLD_", "PMIX_", "HOROVOD_", "DGC_", "NUMBA_", "TF_USE_LEGACY_KERAS")
    inherited = {k: v for k, v in os.environ.items() if k == "NUMBA_CACHE_DIR" or not k.startswith(foreign)}
    environment = {
        **inherited,
        "PATH": _search_path(),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), str(TESTS), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # Ranks that spin beside each other on the same core wait 20 ms for a message (horovodrun never says
        # that it oversubscribes, so Open MPI does not find out by itself).
        "OMPI_MCA_mpi_yield_when_idle": "1",
        # Containers often forbid to read another process' memory; Open MPI would write a warning per rank.
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    }
    if (BIN / "orted").exists():
        # Open MPI from a wheel does not know where it was unpacked, and only its launcher tells it.
        environment["OPAL_PREFIX"] = str(BIN.parent)
    return environment | dict(extra)


def script_path(script: Path | str, folder: Path) -> Path:
    """Where a script lies; one given as its source is written into ``folder``."""
    if isinstance(script, Path):
        return script
    if "\n" not in script:
        return Path(script)
    path = folder / "worker_from_source.py"
    path.write_text(script)
    return path


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """End a launcher and all that it started, also what moved to a session of its own (horovodrun's ranks do)."""
    try:
        started = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    # psutil compares creation times, so a number that meanwhile belongs to somebody else is left alone.
    _, alive = psutil.wait_procs(started, timeout=1)
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(alive, timeout=60)


def runs(pid: int) -> bool:
    """Whether a process lives; one that has ended and waits for its parent does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read_reports(path: Path) -> list[Any]:
    """What one rank has reported, as far as it came."""
    if not path.exists():
        return []
    reports = []
    for line in path.read_text().splitlines():
        try:
            reports.append(json.loads(line))
        except json.JSONDecodeError:
            # Killed in the middle of its last line.
            break
    return reports
