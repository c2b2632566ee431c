"""What happens when something goes wrong with a job of two ranks: faults x ways x launchers, as a table.

    python benchmarks/chaos/matrix.py                                   # everything: more than an hour
    python benchmarks/chaos/matrix.py --faults kill,stop --ways A,dense --launchers mpirun --quick
    python benchmarks/chaos/matrix.py --missing --quick                 # cells without a row, after an interruption
    python benchmarks/chaos/matrix.py --markdown                        # the table of docs/chaos.md from the results

Each cell is a job of its own: a small model on two ranks, to one of which something happens in its sixth step
(``faults.py``). It is watched from outside: when the launcher has ended after the fault and with what status, what a
user reads, what is left five seconds later. A job that comes to its end must have the same parameters on both ranks,
and the same as without a fault. Processes are known by a variable of their environment, and none outlives its cell.
Cells that are run again replace their rows in ``benchmarks/results/chaos.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(HERE)]

from cell import clear_all, run_cell  # noqa: E402
from faults import FAULTS  # noqa: E402
from report import RESULTS, read_rows, write_docs, write_rows  # noqa: E402

WAYS = ("A", "B", "tape", "keras", "dense", "dense_tape")
LAUNCHERS = ("mpirun", "gloo")
WORST = ("HANGS", "WRONG", "left over", "ends, unclear")
"""A cell that is run several times keeps the worst of its rows."""


def main() -> None:
    """Run the cells that are asked for, two at a time, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--launchers", default=",".join(LAUNCHERS))
    parser.add_argument("--quick", action="store_true", help="stop a rank for 5 s instead of 60")
    parser.add_argument("--missing", action="store_true", help="only cells that have no row yet")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each cell; the worst is kept")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after the fault until a job counts as hung")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--markdown", action="store_true", help="run nothing; write the table into docs/chaos.md")
    options = parser.parse_args()
    if options.markdown:
        write_docs(options.json)
        return
    asked = [
        chosen(text, allowed)
        for text, allowed in (
            (options.faults, tuple(FAULTS)),
            (options.ways, WAYS),
            (options.launchers, LAUNCHERS),
        )
    ]
    rows = read_rows(options.json)
    keeping, stopped = threading.Lock(), threading.Event()
    stop = 5.0 if options.quick else 60.0

    def run(cell: tuple[str, str, str]) -> None:
        fault, way, launcher = cell
        tries = [run_cell(way, launcher, fault, stop, options.limit) for _ in range(options.repeat)]
        row = min(tries, key=_badness)
        row["stop"] = stop
        row["runs"] = options.repeat
        with keeping:
            if stopped.is_set():
                return
            plain = rows.get((way, launcher, "none"))
            if (
                row["verdict"] == "goes on"
                and fault != "none"
                and plain is not None
                and row["digests"] != plain["digests"]
            ):
                row["verdict"] = "WRONG"
            rows[way, launcher, fault] = row
            write_rows(options.json, rows)
            print(line(row), flush=True)

    cells = list(itertools.product(*asked))
    if options.missing:
        cells = [(fault, way, launcher) for fault, way, launcher in cells if (way, launcher, fault) not in rows]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    pool = ThreadPoolExecutor(options.jobs)
    try:
        list(pool.map(run, cells))
    except BaseException:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # a second one must not leave jobs behind
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
        clear_all()
        raise
    pool.shutdown()


def chosen(text: str, allowed: tuple[str, ...]) -> list[str]:
    """The names in ``text``, all of them allowed."""
    names = text.split(",")
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}; allowed: {', '.join(allowed)}")
    return names


def _badness(row: dict[str, Any]) -> int:
    return WORST.index(row["verdict"]) if row["verdict"] in WORST else len(WORST)


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    place = f"{row['fault']:18} {row['way']:10} {row['launcher']:6}"
    found = {key: row[key] for key in ("seconds", "status", "reads", "left")}
    return f"{place} {row['verdict']:14} {json.dumps(found)}"


if __name__ == "__main__":
    main()
