"""What happens when something goes wrong with a job of two ranks: faults x ways x launchers, as a table.

    python benchmarks/chaos/matrix.py                                   # everything: more than an hour
    python benchmarks/chaos/matrix.py --faults kill,stop --ways A,dense --launchers mpirun --quick
    python benchmarks/chaos/matrix.py --sample 40 --quick               # 40 of all cells; --seed draws others
    python benchmarks/chaos/matrix.py --missing --quick                 # cells without a row, after an interruption
    python benchmarks/chaos/matrix.py --markdown                        # the table of README.md from the results

Each cell is a job of its own: a small model on two ranks, to one of which something happens in its sixth step
(``faults.py``). It is watched from outside: when the launcher has ended after the fault and with what status, what a
user reads, what is left five seconds later. A job that comes to its end must have the same parameters on both ranks,
and the same as one to which nothing happened, which is run first in the same call. Processes are known by a variable of
their environment, and none outlives its cell. Cells that are run again replace their rows in
``benchmarks/results/chaos.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(HERE)]

from cell import clear_all, run_cell  # noqa: E402
from cells import Cell, Matrix, asked, parser_of  # noqa: E402
from faults import FAULTS  # noqa: E402
from report import RESULTS, write_docs  # noqa: E402

WAYS = ("A", "B", "tape", "keras", "dense", "dense_tape")
WORST = ("HANGS", "WRONG", "left over", "ends, unclear")
"""A cell that is run several times keeps the worst of its rows."""


def main() -> None:
    """Run the cells that are asked for, two at a time, and keep what was found."""
    parser = parser_of(__doc__, FAULTS, WAYS, 90.0, RESULTS)
    parser.add_argument("--quick", action="store_true", help="stop a rank for 5 s instead of 60")
    parser.add_argument("--missing", action="store_true", help="only cells that have no row yet")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each cell; the worst is kept")
    options = parser.parse_args()
    if options.markdown:
        write_docs(options.json)
        return
    stop = 5.0 if options.quick else 60.0

    def run(cell: Cell) -> dict[str, Any]:
        fault, way, launcher = cell
        tries = [run_cell(way, launcher, fault, stop, options.limit) for _ in range(options.repeat)]
        worst: dict[str, Any] = min(tries, key=_badness)
        return {**worst, "stop": stop, "runs": options.repeat}

    matrix = Matrix(options.json, FAULTS, run, lambda row: print(line(row), flush=True), clear_all)
    matrix.run_all(asked(options, FAULTS, WAYS, matrix.rows if options.missing else ()), options.jobs)


def _badness(row: dict[str, Any]) -> int:
    return WORST.index(row["verdict"]) if row["verdict"] in WORST else len(WORST)


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    place = f"{row['fault']:18} {row['way']:10} {row['launcher']:6}"
    found = {key: row[key] for key in ("seconds", "status", "reads", "left")}
    return f"{place} {row['verdict']:14} {json.dumps(found)}"


if __name__ == "__main__":
    main()
