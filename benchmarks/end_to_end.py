"""Training steps of whole models over a network: every method beside plain SGD and dense Horovod.

    python benchmarks/end_to_end.py --models mlp --methods none dense dgc-b --rates 1gbit --pin

Hosts and links are those of ``benchmarks/network`` (root and iproute2 needed); ``--here`` runs the ranks on this
machine's loopback instead. In every round each method takes a block of steps, in changing order, and ratios are those
of blocks of one round: only they mean something on a machine that is shared. Step times are medians over all steps,
means over the ranks. Where others use the machine too, ``--real-time`` puts the ranks before them; keep it short.

The methods share a process, and with it Horovod, whose thread takes a little even when idle, and memory: what one
method's gradients leave free serves the next one's, which alone would ask the kernel for fresh pages in every step
(MLP: 85 ms instead of 59). ``--apart`` starts every method by itself in every round, which takes longer; only then
is the peak memory a method's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent)]

from machine import facts, one_item_a_line  # noqa: E402
from network.lab import Lab, LabError  # noqa: E402
from network.launch import LAUNCHERS, command  # noqa: E402
from training.methods import METHODS  # noqa: E402
from training.models import TASKS  # noqa: E402
from training.plots import plot  # noqa: E402
from training.summary import summarise, table  # noqa: E402

INTO = "DGC_END_TO_END_INTO"


def arguments() -> argparse.Namespace:
    """The command line, of the whole benchmark and of each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(TASKS), default=["mlp"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["none", "dense", "dgc-a", "dgc-b"])
    parser.add_argument("--rates", nargs="+", default=["1gbit"], help="of the links: 10gbit, 100mbit, none, ...")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2], help="hosts, one rank each")
    parser.add_argument("--pairs", type=int, default=5, help="rounds; each gives a ratio")
    parser.add_argument("--steps", type=int, default=4, help="that count, of each method in each round")
    parser.add_argument("--warm", type=int, default=5, help="steps of each method before the first round")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch in each rank")
    parser.add_argument("--weight-decay", type=float, help="of all optimizers, instead of the models' own")
    parser.add_argument("--pin", action="store_true", help="cores of its own for each host")
    parser.add_argument("--real-time", action="store_true", help="ranks go before all other processes of the machine")
    parser.add_argument("--apart", action="store_true", help="a process for each method in each round, as users have")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="mpirun")
    parser.add_argument("--here", action="store_true", help="no lab: ranks on this machine, by mpirun")
    parser.add_argument("--json", type=Path, help="write rows, machine and versions to this file")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write figures")
    return parser.parse_args()


def rank(given: argparse.Namespace, into: Path) -> None:
    """What every rank does."""
    import torch
    from training.rounds import Rank

    torch.set_num_threads(given.threads)
    measured = Rank(given.models[0], given.methods, given.warm, given.weight_decay)
    for number in range(given.pairs):
        measured.round(number, given.steps)
    number = next(int(os.environ[name]) for name in ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK") if name in os.environ)
    found = {"parameters": measured.parameters, "rows": measured.rows}
    (into / f"{number}.json").write_text(json.dumps(found))


def run(lab: Lab | None, given: argparse.Namespace, ranks: int, *chosen: str) -> list[dict[str, Any]]:
    """One job on the links as they are; returns what each rank found. Of its arguments the last ones count."""
    job = [sys.executable, str(BENCHMARKS / "end_to_end.py"), *sys.argv[1:], *chosen]
    with tempfile.TemporaryDirectory() as into:
        more = {INTO: into, "OMP_NUM_THREADS": str(given.threads)}
        if lab is None:
            start = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *job]
            subprocess.run(start, env={**os.environ, **more}, check=True)
        else:
            start = command(lab, job, given.launcher, real_time=given.real_time)
            started = lab.start("head", start, env={**lab.environment, **more})
            if started.wait():
                raise LabError(f"the ranks ended with status {started.returncode}")
        return [json.loads((Path(into) / f"{number}.json").read_text()) for number in range(ranks)]


def launch(lab: Lab | None, given: argparse.Namespace, model: str, ranks: int) -> list[dict[str, Any]]:
    """Measure one model on the links as they are; returns its rows."""
    if given.apart:
        found: list[dict[str, Any]] = []
        for number in range(given.pairs):
            begin = number % len(given.methods)
            for method in given.methods[begin:] + given.methods[:begin]:
                new = run(lab, given, ranks, "--models", model, "--pairs", "1", "--methods", method)
                found = found or [{"parameters": one["parameters"], "rows": {}} for one in new]
                for all_found, one in zip(found, new, strict=True):
                    rows = all_found["rows"].setdefault(method, {"blocks": [], "steps": []})
                    for kind, measured in one["rows"][method].items():
                        rows[kind] += measured
    else:
        found = run(lab, given, ranks, "--models", model)
    rows = summarise([{method: one["rows"][method] for method in given.methods} for one in found])
    return [{"parameters": found[0]["parameters"], **row} for row in rows]


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """All models on all links."""
    rows: list[dict[str, Any]] = []
    for ranks in given.ranks:
        with ExitStack() as stack:
            lab = None if given.here else stack.enter_context(Lab(ranks, None, given.pin, given.launcher))
            for rate in ["none"] if lab is None else given.rates:
                carried = None
                if lab is not None:
                    for host in lab.hosts:
                        lab.rate(host, rate)
                    carried = lab.measure()
                    print(f"{ranks} hosts, a link of {rate} carries {carried / 1e6:.4g} Mbit/s", flush=True)
                for model in given.models:
                    where = {"model": model, "ranks": ranks, "rate": rate, "carried": carried}
                    new = [{**where, **row} for row in launch(lab, given, model, ranks)]
                    print(f"\n{table(new)}\n", flush=True)
                    rows += new
    return rows


def main() -> int:
    """Measure and write, or be a rank."""
    given = arguments()
    if INTO in os.environ:
        rank(given, Path(os.environ[INTO]))
        return 0
    try:
        rows = measure(given)
    except LabError as error:
        print(f"error: {error}; --here does without the lab", file=sys.stderr)
        return 2
    if given.json:
        settings = {
            name: getattr(given, name)
            for name in ("pairs", "steps", "warm", "threads", "pin", "real_time", "apart", "launcher", "weight_decay")
        }
        report = {**facts("torch", "horovod", "numpy", "numba", "mpi4py"), **settings, "rows": rows}
        given.json.write_text(one_item_a_line(report))
    if given.plots:
        given.plots.mkdir(parents=True, exist_ok=True)
        plot(rows, given.plots)
    return 0


if __name__ == "__main__":
    sys.exit(main())
