"""Start the runs of a plan one after the other, watch them, and keep what they have found."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from evidence.application import EvidenceError, Scale
from evidence.applications import application_class
from evidence.estimate import Estimate
from evidence.plan import SMALL_RANKS, Run
from examples.demo import BIN, launch_environment

REPOSITORY = Path(__file__).resolve().parent.parent
UNFINISHED = ".unfinished"
"""Folder within the results: checkpoints and logs of runs that have not come to their end."""


class RunFailedError(Exception):
    """A training ended without a result; the message has its last words."""


def available(applications: Sequence[str], scale: Scale) -> dict[str, str]:
    """Build the data of each application, in this process, before any rank starts.

    Args:
        applications: names.
        scale: how large.

    Returns:
        For each application that cannot run here, one sentence about what is missing.
    """
    missing = {}
    for name in applications:
        try:
            found = application_class(name)
            sentence = found.missing()
            if sentence is None:
                found.prepare(scale)
            else:
                missing[name] = sentence
        except EvidenceError as error:
            missing[name] = str(error)
    return missing


class Launcher:
    """Runs of one size, whose results lie in one folder."""

    def __init__(self, results: Path, scale: Scale, ranks: int | None, out: TextIO = sys.stdout) -> None:
        """Keep where and how.

        Args:
            results: folder of the results; made if missing.
            scale: how large the trainings are.
            ranks: of every run; None: what the application says, two for all that is not the full plan.
            out: where progress is written.
        """
        self._results, self._scale, self._ranks, self._out = results, scale, ranks, out

    def ranks_of(self, run: Run) -> int:
        """How many ranks a run is given."""
        if self._ranks is not None:
            return self._ranks
        return int(application_class(run.application).ranks) if self._scale == "full" else SMALL_RANKS

    def result(self, run: Run) -> dict[str, Any] | None:
        """What a run has found; None if it has not come to its end.

        Raises:
            EvidenceError: the file is of another plan, or damaged.
        """
        path = self._results / f"{run.id}.json"
        try:
            found = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            raise EvidenceError(f"{path} is damaged; delete it, and call again") from None
        for name, wanted in (("scale", self._scale), ("ranks", self.ranks_of(run))):
            if found.get(name) != wanted:
                raise EvidenceError(
                    f"{path} has {name} {found.get(name)}, this plan {wanted}; give another --results folder, or "
                    "delete the file"
                )
        return found

    def run_all(self, runs: Sequence[Run]) -> dict[Run, str]:
        """Train all that have no result yet, in this order.

        Returns:
            For each run that failed, its last words; the others go on.

        Raises:
            EvidenceError: another call is at work in the folder, or files cannot be written.
        """
        failed: dict[Run, str] = {}
        with self._alone():
            results = {run: self.result(run) for run in runs}
            estimate = Estimate(self._scale, {run: found for run, found in results.items() if found is not None})
            todo = [run for run in runs if results[run] is None]
            for number, run in enumerate(todo):
                began = time.monotonic()
                title = f"[{len(runs) - len(todo) + number + 1}/{len(runs)}] {run.id}"
                rest = todo[number + 1 :]

                def show(progress: dict[str, Any], title: str = title, run: Run = run, rest: Any = rest) -> None:
                    seconds = time.monotonic() - began  # noqa: B023 - called within this turn only
                    self._show(title, progress, estimate.left(run, seconds, progress, rest))

                try:
                    found = self.train(run, show)
                except RunFailedError as error:
                    failed[run] = str(error)
                    self._line(f"{title}: failed: {error}")
                    continue
                estimate.add(run, found, time.monotonic() - began)
                final = ", ".join(f"{name} {value:.4g}" for name, value in found["final"].items())
                self._line(
                    f"{title}: {final}; {time.monotonic() - began:.0f} s; "
                    f"about {duration(estimate.left(None, 0, {}, rest))} left"
                )
        return failed

    def train(self, run: Run, show: Callable[[dict[str, Any]], None] = lambda progress: None) -> dict[str, Any]:
        """Train one run, from its checkpoint if it has one.

        Args:
            run: which.
            show: called with what the run says of itself, about once a second.

        Returns:
            Its result.

        Raises:
            RunFailedError: it ended without one.
            EvidenceError: there is no horovodrun, or the folder cannot be written.
        """
        folder = self._results / UNFINISHED / run.id
        path = self._results / f"{run.id}.json"
        log = self._results / UNFINISHED / f"{run.id}.log"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with log.open("wb") as output:
                process = subprocess.Popen(
                    self._command(run, folder, path),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=_environment(),
                    cwd=REPOSITORY,
                    start_new_session=True,
                )
        except OSError as error:
            raise EvidenceError(f"{error.filename}: {error.strerror}; what was done so far is kept") from error
        try:
            while process.poll() is None:
                show(_progress(folder / "progress.json"))
                _wait(process, 1.0)
        finally:
            end(process)
        found = self.result(run) if process.returncode == 0 else None
        if found is None:
            raise RunFailedError(last_words(log, process.returncode))
        log.unlink(missing_ok=True)
        return found

    def _command(self, run: Run, folder: Path, path: Path) -> list[str]:
        horovodrun = shutil.which("horovodrun", path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
        if horovodrun is None:
            raise EvidenceError("horovodrun is missing: install Horovod (make setup), and call .venv/bin/python")
        ranks = str(self.ranks_of(run))
        module = [sys.executable, "-m", "evidence.rank", run.application, run.variant, str(run.seed)]
        places = ["--folder", str(folder.resolve()), "--result", str(path.resolve())]
        return [horovodrun, "-np", ranks, *module, "--scale", self._scale, *places, "--launcher", str(os.getpid())]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other calls out of the folder."""
        try:
            (self._results / UNFINISHED).mkdir(parents=True, exist_ok=True)
            lock = (self._results / UNFINISHED / "lock").open("w")
        except OSError as error:
            raise EvidenceError(f"{self._results} cannot be written: {error.strerror}") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise EvidenceError(
                    f"another call is at work in {self._results}; wait for it, or give another --results folder"
                ) from None
            yield

    def _show(self, title: str, progress: dict[str, Any], left: float) -> None:
        if not self._out.isatty():
            return
        now = "starting"
        if progress:
            metrics = ", ".join(f"{name} {value:.4g}" for name, value in progress["metrics"].items())
            now = f"epoch {progress['epoch']}/{progress['epochs']}, {metrics}"
        print(f"\r\033[K{title}: {now}; about {duration(left)} left", end="", file=self._out, flush=True)

    def _line(self, text: str) -> None:
        clear = "\r\033[K" if self._out.isatty() else ""
        print(f"{clear}{text}", file=self._out, flush=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """End horovodrun, if it is still at work, and with it its ranks."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_words(log: Path, status: int) -> str:
    """What a run that failed wrote last: the line that says what is wrong, and where all of it stands."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    said = [line.partition("error: ")[2] for line in lines if "error: " in line]
    raised = [line for line in lines if "Error: " in line]
    words = (said or raised or [f"it ended with status {status}"])[0]
    return f"{words.partition('<stderr>:')[2] or words} (all it wrote: {log})"


def duration(seconds: float) -> str:
    """As a reader likes it: "40 s", "12 min", "1 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _environment() -> dict[str, str]:
    environment = launch_environment()
    paths = [str(REPOSITORY), environment.get("PYTHONPATH", "")]
    # One core for each rank: they share this machine.
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    return {**threads, **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _progress(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return
