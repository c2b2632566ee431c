"""dgc beside PyTorch's own DDP hooks, fp16 and PowerSGD: step time, bytes and accuracy, over Gloo.

    python benchmarks/powersgd.py --pin --json benchmarks/results/powersgd.json

Hosts and links are those of ``benchmarks/network`` (root and iproute2 needed); ``--here`` runs two ranks on this
machine's loopback. In every round each method takes a block of steps, in changing order; a time is the median over all
steps, the mean over the ranks. Bytes are those that a rank sends over its link in a step. Accuracy is that on held-out
digits after the same number of steps from the same model: a CNN that sees the image, and an LSTM that reads it row by
row. Learning rates are equal; PowerSGD begins with two dense steps; dgc sends 0.1 % where it is timed, and what
``steps=`` chooses where accuracy is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from machine import facts, one_item_a_line  # noqa: E402
from network.lab import Lab, LabError  # noqa: E402
from network.launch import command  # noqa: E402
from network.links import own_counters  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # noqa: E402
from training.models import TASKS  # noqa: E402

import dgc.torch as dgc  # noqa: E402

INTO = "DGC_POWERSGD_INTO"
METHODS = ("dense", "fp16", "powersgd-1", "powersgd-4", "dgc", "dgc-hook")
"""DDP without a hook; its hooks, with PowerSGD's rank; dgc's optimizer without DDP; DDP with dgc's hook."""
TRAIN_IMAGES, BATCH = 1347, 16


class RowLSTM(nn.Module):
    """Reads an 8 x 8 image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 128, num_layers=2, batch_first=True)
        self.classes = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classes(self.lstm(images.flatten(1, 2))[0][:, -1])


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip


READERS = {"digits, CNN": (cnn, 0.04), "digits, LSTM": (RowLSTM, 0.1)}
"""Name -> the model and its learning rate."""


def arguments() -> argparse.Namespace:
    """The command line, of the whole benchmark and of each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(TASKS), default=["mlp", "lstm"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rates", nargs="+", default=["10gbit", "1gbit", "100mbit"], help="of the links")
    parser.add_argument("--ranks", type=int, default=2, help="hosts, one rank each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of each method in each round")
    parser.add_argument("--training-steps", type=int, default=840, help="before accuracy is measured; 0: it is not")
    parser.add_argument("--seeds", type=int, default=3, help="trainings whose accuracy is averaged")
    parser.add_argument("--pin", action="store_true", help="cores of its own for each host")
    parser.add_argument("--here", action="store_true", help="no lab: ranks on this machine, by mpirun")
    parser.add_argument("--json", type=Path, help="write rows, machine and versions to this file")
    return parser.parse_args()


def make(method: str, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> tuple[nn.Module, Any]:
    """What takes part in the exchange, and the optimizer; the model is the same on all ranks."""
    compression = dgc.Compression.dgc(steps=steps or None)
    if method == "dgc":
        return model, dgc.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    # One bucket: with several, Gloo's threads begin PowerSGD's collectives in another order on each rank, and wait.
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=25 if method == "dgc-hook" else 10_000)
    if method == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method.startswith("powersgd"):
        rank = int(method.partition("-")[2])
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif method == "dgc-hook":
        state = dgc.ddp.CompressionState(compression, optimizer, model.named_parameters())
        wrapped.register_comm_hook(state, dgc.ddp.compression_hook)
    return wrapped, optimizer


def timed(given: argparse.Namespace) -> list[dict[str, Any]]:
    """One rank's seconds and bytes of each step."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for name in given.models:
        task, generator = TASKS[name], torch.Generator().manual_seed(dist.get_rank())
        batches, trained = [task.draw(generator) for _ in range(4)], {}
        for method in given.methods:
            torch.manual_seed(1)
            model = task.build()
            trained[method] = make(method, model, task.optimizer(model.parameters(), **task.options), 0)
        for number in range(given.rounds + 1):  # the first one does not count
            begin = number % len(given.methods)
            for method in given.methods[begin:] + given.methods[:begin]:
                row = found.setdefault((name, method), {"seconds": [], "bytes": []})
                model, optimizer = trained[method]
                dist.barrier()
                for step in range(given.steps + 1):  # the caches are another method's in the first step
                    sent, start = own_bytes(), time.perf_counter()
                    optimizer.zero_grad()
                    task.loss(model, batches[step % 4]).backward()
                    optimizer.step()
                    if number and step:
                        row["seconds"].append(time.perf_counter() - start)
                        row["bytes"].append(own_bytes() - sent)
    return [{"model": m, "method": n, **{k: statistics.median(v) for k, v in r.items()}} for (m, n), r in found.items()]


def own_bytes() -> int:
    """Sent by this host so far."""
    return sum(counted["sent"] for counted in own_counters().values())


def trained(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The accuracy of each method's models, equal on all ranks."""
    from sklearn.datasets import load_digits

    images, labels = (torch.tensor(a) for a in load_digits(return_X_y=True))
    images, rows = images.float().view(-1, 1, 8, 8) / 16, []
    for name, (build, rate) in READERS.items():
        for method in given.methods:
            accuracies = []
            for seed in range(given.seeds):
                torch.manual_seed(seed)
                own = build()
                sgd = torch.optim.SGD(own.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
                model, optimizer = make(method, own, sgd, given.training_steps)
                order = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
                for _ in range(given.training_steps):
                    chosen = torch.randint(TRAIN_IMAGES, (BATCH,), generator=order)
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
                    optimizer.step()
                with torch.no_grad():
                    right = own(images[TRAIN_IMAGES:]).argmax(1) == labels[TRAIN_IMAGES:]
                accuracies.append(100 * right.float().mean().item())
            rows.append({"model": name, "method": method, "accuracy": statistics.fmean(accuracies), "each": accuracies})
    return rows


def rank(given: argparse.Namespace, into: Path) -> None:
    """What every rank does."""
    number, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{into}/meeting", rank=number, world_size=size)
    torch.set_num_threads(1)
    rows = timed(given) + (trained(given) if given.training_steps else [])
    (into / f"{number}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def run(lab: Lab | None, given: argparse.Namespace, *chosen: str) -> list[dict[str, Any]]:
    """One job on the links as they are; returns its rows. Of its arguments the last ones count."""
    job = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], *chosen]
    with tempfile.TemporaryDirectory() as into:
        more = {INTO: into, "OMP_NUM_THREADS": "1"}
        if lab is None:
            start = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(given.ranks), *job]
            subprocess.run(start, env={**os.environ, **more}, check=True)
        else:
            started = lab.start("head", command(lab, job, "mpirun"), env={**lab.environment, **more})
            if started.wait():
                raise LabError(f"the ranks ended with status {started.returncode}")
        found = [json.loads((Path(into) / f"{number}.json").read_text()) for number in range(given.ranks)]
    for rows in zip(*found, strict=True):
        for key in {"seconds", "bytes"} & set(rows[0]):
            rows[0][key] = statistics.fmean(row[key] for row in rows)
    return found[0]


def table(rows: list[dict[str, Any]], methods: list[str]) -> str:
    """All figures, as Markdown: a row for each method."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        if "accuracy" in row:
            cells.setdefault(f"{row['model']}, accuracy", {})[row["method"]] = f"{row['accuracy']:.2f} %"
            continue
        cells.setdefault(f"{row['model']}, {row['rate']}", {})[row["method"]] = f"{1000 * row['seconds']:.0f} ms"
        cells.setdefault(f"{row['model']}, kB sent", {})[row["method"]] = f"{row['bytes'] / 1000:,.0f}"
    lines = [["", *cells], ["---"] * (len(cells) + 1)]
    lines += [[method, *(column[method] for column in cells.values())] for method in methods]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Measure and write, or be a rank."""
    given = arguments()
    if INTO in os.environ:
        rank(given, Path(os.environ[INTO]))
        return 0
    rows: list[dict[str, Any]] = []
    try:
        with ExitStack() as stack:
            lab = None if given.here else stack.enter_context(Lab(given.ranks, None, given.pin, "mpirun"))
            hosts = [] if lab is None else [(lab, host) for host in lab.hosts]
            for rate in ["none"] if lab is None else given.rates:
                for network, host in hosts:
                    network.rate(host, rate)
                rows += [{"rate": rate, **row} for row in run(lab, given, "--training-steps", "0")]
            if given.training_steps:
                for network, host in hosts:
                    network.rate(host, "none")
                rows += run(lab, given, "--models")
    except LabError as error:
        print(f"error: {error}; --here does without the lab", file=sys.stderr)
        return 2
    print(table(rows, given.methods))
    if given.json:
        settings = {name: getattr(given, name) for name in ("ranks", "rounds", "steps", "training_steps", "pin")}
        report = {**facts("torch", "numpy", "numba", "mpi4py"), **settings, "rows": rows}
        given.json.write_text(one_item_a_line(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
