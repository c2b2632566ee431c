"""What happens to a job between two hosts when the network or a host fails: faults x ways x launchers, as a table.

    python benchmarks/chaos/network_matrix.py                           # everything: an hour; as root
    python benchmarks/chaos/network_matrix.py --faults link_down,kill_host --ways B,dense --launchers mpirun
    python benchmarks/chaos/network_matrix.py --markdown                # the table of docs/chaos.md from the results

Each cell is a job of its own on a lab of two hosts (``benchmarks/network``): a small model, saved every other step
(``network_rank.py``). In its sixth step something happens to the second host, or to the rank there
(``network_faults.py``). Where the job does not come to its end, a new one goes on from the last checkpoint on a lab
that is well, and must end with the parameters of a job to which nothing happened. Cells that are run again replace
their rows in ``benchmarks/results/chaos-network.json``.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks"), str(HERE)]

from matrix import chosen, line  # noqa: E402
from network_cell import end_all, is_ending, run_cell  # noqa: E402
from network_faults import NETWORK_FAULTS  # noqa: E402
from network_report import RESULTS, WAYS, write_docs  # noqa: E402
from report import read_rows, write_rows  # noqa: E402


def main() -> None:
    """Run the cells that are asked for, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", default=",".join(NETWORK_FAULTS))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--launchers", default="mpirun,gloo")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds after the fault until a job counts as hung")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--markdown", action="store_true", help="run nothing; write the table into docs/chaos.md")
    options = parser.parse_args()
    if options.markdown:
        write_docs(options.json)
        return
    asked = [
        chosen(options.faults, tuple(NETWORK_FAULTS)),
        chosen(options.ways, WAYS),
        chosen(options.launchers, ("mpirun", "gloo")),
    ]
    rows = read_rows(options.json)
    keeping = threading.Lock()

    def run(cell: tuple[str, str, str]) -> None:
        fault, way, launcher = cell
        row = run_cell(way, launcher, fault, options.limit)
        with keeping:
            if is_ending():
                return
            plain = rows.get((way, launcher, "none"), row)
            if row["verdict"] == "goes on" and row["digests"] != plain["digests"]:
                row["verdict"] = "WRONG"
            row["same"] = row["resumed_digests"] == plain["digests"]
            rows[way, launcher, fault] = row
            write_rows(options.json, rows, NETWORK_FAULTS)
            print(line(row), f"resumed at {row['resumed']}, same: {row['same']}", flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            list(pool.map(run, itertools.product(*asked)))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise


if __name__ == "__main__":
    main()
