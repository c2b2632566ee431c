"""One job of the matrix of chaos: started, hurt, watched, and cleaned up after."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from faults import FAULTS, VICTIM, Fault
from launch_tools import environment_for, launch_command
from stacks import stacks_of

HERE = Path(__file__).resolve().parent
MARK = "DGC_CHAOS_JOB"
"""Bears a number of the job's own in the environment of all its processes, wherever they have moved."""
RANKS = 2
LOOPS = dict.fromkeys(("A", "B", "dense"), "torch_ways.py")
LOOPS |= dict.fromkeys(("tape", "keras", "dense_tape"), "tensorflow_ways.py")
"""The script that a rank runs, by way."""
START_SECONDS = 240.0
LINGER_SECONDS = 5.0
CACHES = ("torchinductor_", "__autograph_generated_file")
"""What a framework leaves in TMPDIR: PyTorch for later jobs, TensorFlow where a process was killed."""


_under_way: dict[str, Path] = {}


@dataclass
class Found:
    """What one job did.

    Attributes:
        verdict: "goes on", "saves", "ends, clear", "ends, unclear", "HANGS", "WRONG" or "left over".
        seconds: from the fault to the launcher's end.
        status: of the launcher; negative if a signal ended it, None where it hung.
        reads: the first line of an error in the launcher's output.
        left: processes, files and shared memory that are there afterwards.
        digests: of each rank's parameters, if it came to its end.
        output: the launcher's whole output, shortened.
        stacks: where the ranks hung.
    """

    way: str
    launcher: str
    fault: str
    verdict: str = ""
    seconds: float = 0.0
    status: int | None = None
    reads: str = ""
    left: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    output: str = ""
    stacks: str = ""


def run_cell(way: str, launcher: str, fault: str, stop: float, limit: float) -> dict[str, Any]:
    """Run one job; whatever happens, nothing of it is there afterwards.

    Args:
        way: "A", "B", "dense", "tape", "keras" or "dense_tape".
        launcher: "mpirun" or "gloo".
        fault: a name in ``FAULTS``.
        stop: seconds for which the fault "stop" stops a rank.
        limit: seconds after the fault, beyond those of the stop, after which a job counts as hung.
    """
    found = Found(way, launcher, fault)
    mark = uuid.uuid4().hex
    # A short name: Open MPI puts sockets below it, whose paths have at most 108 bytes.
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    _under_way[mark] = folder
    try:
        (folder / "tmp").mkdir()
        (folder / "job").mkdir()
        _run(found, FAULTS[fault], folder, mark, stop, limit)
    finally:
        _clear(mark)
    return asdict(found)


def clear_all() -> None:
    """End the jobs under way, whichever thread has started them."""
    for mark in list(_under_way):
        _clear(mark)


def _clear(mark: str) -> None:
    while alive := processes_of(mark):
        for process in alive:
            _kill(process)
    shutil.rmtree(_under_way.pop(mark, Path("/nowhere")), ignore_errors=True)


def processes_of(mark: str) -> list[psutil.Process]:
    """All processes whose environment bears ``mark``; not those that are dead and not yet collected."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _run(found: Found, fault: Fault, folder: Path, mark: str, stop: float, limit: float) -> None:
    job = folder / "job"
    environment = environment_for({MARK: mark, "TMPDIR": str(folder / "tmp"), **fault.environment})
    environment.update(PYTHONUNBUFFERED="1", TF_CPP_MIN_LOG_LEVEL="2")
    command = [*launch_command(found.launcher, RANKS), sys.executable, str(HERE / LOOPS[found.way])]
    with (folder / "output").open("wb") as output:
        launcher = subprocess.Popen(
            [*command, found.way, found.fault, str(job)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            begun = _hurt(fault, job, launcher, stop)
            found.status = wait(launcher, begun + limit + (stop if fault.name == "stop" else 0))
            found.seconds = round(time.monotonic() - begun, 1)
            if found.status is None:
                found.stacks = stacks_of(processes_of(mark))
            _look(found, folder, mark)
        finally:
            if launcher.poll() is None:
                launcher.kill()
                launcher.wait()
    found.output = shorten((folder / "output").read_text(errors="replace"))
    found.reads = first_error(found.output) if found.status != 0 else ""
    found.digests = [read_line(job / f"finished.{rank}", 1) for rank in range(RANKS)]
    found.verdict = verdict_of(found, fault, job)


def _hurt(fault: Fault, job: Path, launcher: subprocess.Popen[bytes], stop: float) -> float:
    """Wait until the fault has happened, or let it happen; the time of it."""
    outside = fault.where == "outside"
    begun = await_marks(launcher, job, inside=not outside and bool(fault.where))
    if begun is None:
        return time.monotonic()
    pids = [int(read_line(job / f"pid.{rank}", 1) or 0) for rank in range(RANKS)]
    if fault.name == "stop":
        time.sleep(stop)
        _signal(pids[VICTIM], signal.SIGCONT)
    if outside:
        begun = time.monotonic()
        if fault.name.startswith("interrupt"):
            _signal(launcher.pid, signal.SIGINT)
        if fault.name == "interrupt_all":
            for pid in pids:
                _signal(pid, signal.SIGINT)
        if fault.name.startswith("save"):
            for pid in pids if fault.name == "save_agreed" else pids[VICTIM:]:
                _signal(pid, signal.SIGTERM)
    return begun


def await_marks(launcher: subprocess.Popen[Any], job: Path, inside: bool) -> float | None:
    """Wait until the fault has happened on its rank (``inside``), or until all ranks have come to its step.

    Returns:
        When that was; None if the job has ended, or hangs, before.
    """
    marks = [f"fault.{VICTIM}"] if inside else [f"ready.{rank}" for rank in range(RANKS)]
    deadline = time.monotonic() + START_SECONDS
    while not all((job / name).exists() for name in marks):
        if launcher.poll() is not None or time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    return float(read_line(job / marks[-1], 0))


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def wait(launcher: subprocess.Popen[Any], until: float) -> int | None:
    """The launcher's status; None where it is there still when the machine's clock shows ``until``."""
    try:
        return launcher.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _look(found: Found, folder: Path, mark: str) -> None:
    """What is left some seconds after the launcher's end."""
    if found.status is None:
        return
    deadline = time.monotonic() + LINGER_SECONDS
    while (alive := processes_of(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in alive:
        try:
            found.left.append(f"process {' '.join(process.cmdline())[-60:]}")
        except psutil.Error:
            continue
    shared = {line for r in range(RANKS) for line in _lines(folder / "job" / f"ready.{r}")[1:] if line}
    found.left += [f"shared memory {path}" for path in sorted(shared) if Path(path).exists()]
    kept = (path.name for path in sorted((folder / "tmp").iterdir()))
    found.left += [f"TMPDIR/{name}" for name in kept if not name.startswith(CACHES)]
    checkpoint = folder / "job" / "checkpoint"
    found.left += [f"checkpoint/{path.name}" for path in sorted(checkpoint.glob("*")) if _is_partial(path)]


def _is_partial(path: Path) -> bool:
    return bool(re.search(r"\.(part|partial|tmp|lock|new)", path.name))


def _kill(process: psutil.Process) -> None:
    # psutil compares creation times, so a number that meanwhile belongs to somebody else is left alone.
    try:
        process.kill()
        process.wait(5)
    except psutil.Error:
        return


def shorten(output: str, longest: int = 20_000) -> str:
    """Both ends of a long text."""
    return output if len(output) <= longest else f"{output[: longest // 2]}\n[...]\n{output[-longest // 2 :]}"


_PREFIX = re.compile(r"^(\[\d+(,\d+)?\](<std(err|out)>:)?\s*)+")
_FOLDER = re.compile(r"(?<![\w/])/(?:[\w.+-]+/)+")
_ERROR = re.compile(r"^([A-Za-z_][\w.]*\.)?_?[A-Z]\w*(Error|Exception|Interrupt|Exit|Warning)\b(:|$)")
_HEADING = ("Graph execution error:", "in user code:")
"""TensorFlow's, above what was wrong."""
_NOISE = re.compile(r"^([IW]\d{4} |\d{4}-\d\d-\d\d |WARNING: All log messages|\[\S+\] plm:rsh: Warning|-+$)")
_LAUNCHER = re.compile(
    r"^(mpirun (noticed|detected|was|has)|ORTE has lost|Process name|Process \d+ exit|RuntimeError|terminate called)"
)


def first_error(output: str) -> str:
    """The first line that says what was wrong: of a Python exception, or else of the launcher."""
    lines = [_FOLDER.sub("", _PREFIX.sub("", line.rstrip())) for line in output.splitlines()]
    for pattern in (_ERROR, _LAUNCHER):
        for line in lines:
            if pattern.match(line) and "Warning" not in line.split(":")[0] and not line.endswith(_HEADING):
                return line
    # Python shows the line of code below a warning.
    shown = {i + 1 for i, line in enumerate(lines) if "Warning: " in line}
    left = [line for i, line in enumerate(lines) if i not in shown and "Warning: " not in line]
    return next((line for line in reversed(left) if line.strip() and not _NOISE.match(line)), "")


def verdict_of(found: Found, fault: Fault, job: Path) -> str:
    """What is to be thought of it; ``job`` is the folder with the ranks' marks."""
    if found.status is None:
        return "HANGS"
    if found.left:
        return "left over"
    done = [bool(digest) for digest in found.digests]
    if fault.wanted == "goes on" and found.status == 0:
        return "goes on" if all(done) and len(set(found.digests)) == 1 else "WRONG"
    if fault.wanted == "saves" and found.status == 0:
        return "saves" if all((job / f"saved.{rank}").exists() for rank in range(RANKS)) else "WRONG"
    if found.status == 0:
        return "ends, unclear"
    return "ends, clear" if re.search(fault.tells, found.output) else "ends, unclear"


def _lines(path: Path) -> list[str]:
    return path.read_text().split("\n") if path.exists() else []


def read_line(path: Path, number: int) -> str:
    """A line of a mark, counted from 0; nothing where there is none."""
    return [*_lines(path), "", ""][number]
