"""What happens to a job between two hosts when the network or a host fails: faults x ways x launchers, as a table.

    python benchmarks/chaos/network_matrix.py                           # everything: an hour; as root
    python benchmarks/chaos/network_matrix.py --faults link_down,kill_host --ways B,dense --launchers mpirun
    python benchmarks/chaos/network_matrix.py --markdown                # the table of README.md from the results

Each cell is a job of its own on a lab of two hosts (``benchmarks/network``): a small model, saved every other step
(``network_rank.py``). In its sixth step something happens to the second host, or to the rank there
(``network_faults.py``). Where the job does not come to its end, a new one goes on from the last checkpoint on a lab
that is well, and must end with the parameters of a job to which nothing happened, which is run first in the same call.
Cells that are run again replace their rows in ``benchmarks/results/chaos-network.json``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks"), str(HERE)]

from cells import Cell, Matrix, asked, parser_of  # noqa: E402
from matrix import line  # noqa: E402
from network_cell import end_all, run_cell  # noqa: E402
from network_faults import NETWORK_FAULTS  # noqa: E402
from network_report import RESULTS, WAYS, write_docs  # noqa: E402


def main() -> None:
    """Run the cells that are asked for, and keep what was found."""
    options = parser_of(__doc__, NETWORK_FAULTS, WAYS, 100.0, RESULTS).parse_args()
    if options.markdown:
        write_docs(options.json)
        return

    def run(cell: Cell) -> dict[str, Any]:
        fault, way, launcher = cell
        return run_cell(way, launcher, fault, options.limit)

    def say(row: dict[str, Any]) -> None:
        print(line(row), f"resumed at {row['resumed']}, same: {row.get('same')}", flush=True)

    matrix = Matrix(options.json, NETWORK_FAULTS, run, say, end_all, resumes=True)
    matrix.run_all(asked(options, NETWORK_FAULTS, WAYS), options.jobs)


if __name__ == "__main__":
    main()
