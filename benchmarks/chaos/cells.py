"""Cells of a matrix of chaos: which are run, side by side, and with what each is compared."""

from __future__ import annotations

import argparse
import random
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from faults import Fault
from report import Rows, read_rows, write_rows

Cell = tuple[str, str, str]
"""Fault, way and launcher."""
PLAIN = "none"
"""The fault of a job to which nothing happens."""
LAUNCHERS = ("mpirun", "gloo")


def parser_of(
    doc: str, faults: Iterable[str], ways: Iterable[str], limit: float, path: Path
) -> argparse.ArgumentParser:
    """The options that all matrices have.

    Args:
        doc: of the script.
        faults: by name.
        ways: of training.
        limit: seconds after the fault until a job counts as hung.
        path: of the results.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", default=",".join(faults))
    parser.add_argument("--ways", default=",".join(ways))
    parser.add_argument("--launchers", default=",".join(LAUNCHERS))
    parser.add_argument("--limit", type=float, default=limit, help="seconds after the fault until a job counts as hung")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time")
    parser.add_argument("--json", type=Path, default=path)
    parser.add_argument("--sample", type=int, help="so many of these cells, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", action="store_true", help="run nothing; write the table into README.md")
    return parser


def chosen(text: str, allowed: Iterable[str]) -> list[str]:
    """The names in ``text``, all of them allowed."""
    names, known = text.split(","), list(allowed)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}; allowed: {', '.join(known)}")
    return names


def asked(
    options: argparse.Namespace, faults: Iterable[str], ways: Iterable[str], rows: Collection[tuple[str, str, str]] = ()
) -> list[Cell]:
    """The cells that the options name, or a sample of them.

    Args:
        options: of :func:`parser_of`.
        faults: all there are.
        ways: all there are.
        rows: way, launcher and fault of the cells to leave out.
    """
    named = chosen(options.faults, faults), chosen(options.ways, ways), chosen(options.launchers, LAUNCHERS)
    cells = [(fault, way, launcher) for fault, way, launcher in product(*named) if (way, launcher, fault) not in rows]
    if options.sample is None or options.sample >= len(cells):
        return cells
    return sorted(random.Random(options.seed).sample(cells, options.sample), key=cells.index)


@dataclass
class Matrix:
    """Runs cells and keeps their rows.

    Attributes:
        path: of the results; rows of cells that are not run stay as they are.
        faults: by name, in the order of the results.
        run: runs a cell and returns its row.
        say: prints a row.
        end_all: ends the jobs under way, whichever threads have started them.
        resumes: whether a job that did not come to its end is followed by one that goes on from its checkpoint.
    """

    path: Path
    faults: Mapping[str, Fault]
    run: Callable[[Cell], dict[str, Any]]
    say: Callable[[dict[str, Any]], None]
    end_all: Callable[[], None]
    resumes: bool = False
    rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        self.rows = read_rows(self.path)

    def run_all(self, cells: Sequence[Cell], jobs: int) -> None:
        """Run cells, ``jobs`` at a time; those that nothing happens to come first.

        What must go on as if nothing had happened is compared with such a job of this very call, which is added where
        it was not asked for: another version of the package, or of a framework, ends with other parameters.
        """
        plain: dict[tuple[str, str], dict[str, Any]] = {}
        keeping, stopped = threading.Lock(), threading.Event()

        def run(cell: Cell) -> None:
            fault, way, launcher = cell
            row = self.run(cell)
            with keeping:
                if stopped.is_set():
                    return  # what a job does that was ended says nothing
                if fault == PLAIN:
                    plain[way, launcher] = row
                compare(row, plain.get((way, launcher)))
                self.rows[way, launcher, fault] = row
                write_rows(self.path, self.rows, self.faults)
                self.say(row)

        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        pool = ThreadPoolExecutor(jobs)
        try:
            for some in self.in_order(cells):
                list(pool.map(run, some))
        except BaseException:
            for number in before:
                signal.signal(number, signal.SIG_IGN)  # a second one must not leave jobs behind
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            self.end_all()
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        pool.shutdown()

    def in_order(self, cells: Sequence[Cell]) -> tuple[list[Cell], list[Cell]]:
        """The cells to compare with, and the others."""
        others = [cell for cell in cells if cell[0] != PLAIN]
        needed = [cell for cell in cells if cell[0] == PLAIN]
        compared = (cell for cell in others if self.resumes or self.faults[cell[0]].wanted == "goes on")
        needed += [(PLAIN, way, launcher) for _, way, launcher in compared]
        return list(dict.fromkeys(needed)), others


def compare(row: dict[str, Any], plain: dict[str, Any] | None) -> None:
    """Write into a row whether its job, or one that went on from its checkpoint, ended as one that nothing happened to.

    Args:
        row: of the cell.
        plain: of the cell with the same way and launcher to which nothing happened; None where there is none.
    """
    known = plain is not None and plain["verdict"] == "goes on"
    if row["verdict"] == "goes on":
        if plain is None or not known:
            row["verdict"] = "not compared"
        elif row["digests"] != plain["digests"]:
            row["verdict"] = "WRONG"
    if row.get("resumed_digests") is not None:
        row["same"] = row["resumed_digests"] == plain["digests"] if plain is not None and known else None
