"""Run a command on several hosts that are all on this machine, joined by links of a given speed.

    python benchmarks/network/run.py --hosts 2 --rate 1gbit --pin -- python train.py

Needs root and iproute2. Prints what the links carry and, at the end, the bytes that each host sent and received.
``--cleanup`` removes what a killed run left.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from network.lab import Lab, LabError
from network.launch import LAUNCHERS, command
from network.leftovers import clean_up
from network.links import DEVICE


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="2 to 16")
    parser.add_argument("--ranks-each", type=int, default=1, help="ranks of each host")
    parser.add_argument("--rate", default="1gbit", help="of each link, both ways: 10gbit, 100mbit, none, ...")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="mpirun", help="gloo: horovodrun --gloo")
    parser.add_argument("--pin", action="store_true", help="cores of its own for each host")
    parser.add_argument("--real-time", action="store_true", help="ranks go before all other processes of the machine")
    parser.add_argument("--no-measure", action="store_true", help="do not measure a link first")
    parser.add_argument("--cleanup", action="store_true", help="remove what killed runs left, and end")
    parser.add_argument("job", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    given = parser.parse_args()
    given.job = given.job[given.job[:1] == ["--"] :]
    if not given.job and not given.cleanup:
        parser.error("nothing to run: end the line with -- and a command")
    return given


def main() -> int:
    """Build the lab, run the command, say what went over the links."""
    given = arguments()
    if given.cleanup:
        print("\n".join(clean_up()))
        return 0
    try:
        with Lab(given.hosts, given.rate, given.pin, given.launcher) as lab:
            return run(lab, given)
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(lab: Lab, given: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    if not given.no_measure:
        carried = lab.measure() / 1e6
        print(f"lab: a link of {given.rate} carries {carried:.4g} Mbit/s of data", file=sys.stderr)
    start = command(lab, given.job, given.launcher, given.ranks_each, given.real_time)
    before = {name: lab.counters(name)[DEVICE] for name in lab.hosts}
    job = lab.start("head", start)
    try:
        status = job.wait()
    except BaseException:
        job.terminate()
        raise
    for name, then in before.items():
        now = lab.counters(name)[DEVICE]
        sent, received = (now[way] - then[way] for way in ("sent", "received"))
        print(f"lab: {name} sent {sent:,} bytes and received {received:,}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
