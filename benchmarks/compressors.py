"""All compressors on real training gradients: size, error, time, and the accuracy that training with them reaches.

    python benchmarks/compressors.py --accuracy --plot benchmarks/results/compressors.svg

The gradients are those of the digits network (examples/torch_digits.py), one batch of 16 images each. Size, error and
time are of one rank's messages without an exchange; x is residual plus gradient after ``--warm`` steps of feedback.
Accuracy is that of the example on two ranks, started with horovodrun, with the options named in the table. Writes
``benchmarks/results/compressors.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "core" / "tools")]

import numba  # noqa: E402
import numpy as np  # noqa: E402
from contract_tools import Alone, Case  # noqa: E402
from documented import own_names  # noqa: E402

from dgc.core.compressors import SparseValues  # noqa: E402
from dgc.core.message import HEADER_BYTES  # noqa: E402

CASES = [
    *(Case(name) for name in own_names()),
    Case("topk", {"threshold": "global"}),
    Case("strom", {"threshold": 0.1}),
    Case("onebit", {"means": "row"}),
    Case("qsgd", {"bits": 2, "norm": "max"}),
    Case("qsgd", {"bits": 8}),
    Case("dorefa", {"bits": 8}),
]
COPIES = 24
"""Networks' worth of gradients in the timed bucket: 6.8 million elements, which no cache holds."""


def real_gradients(steps: int) -> list[dict[str, np.ndarray]]:
    """Gradients of consecutive batches, of the tensors that are compressed, while the network learns."""
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits

    torch.manual_seed(1)
    torch.set_num_threads(1)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(1024, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 10),
    )
    digits = load_digits()
    images = torch.tensor(digits.images[:898], dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target[:898])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    kept = []
    for step in range(100 + steps):
        chosen = torch.randint(898, (16,))
        optimizer.zero_grad()
        F.cross_entropy(net(images[chosen]), labels[chosen]).backward()
        if step >= 100:
            named = {n: p.grad.numpy().copy() for n, p in net.named_parameters()}
            kept.append({n: g for n, g in named.items() if g.ndim > 1 and g.size >= 1024})
        optimizer.step()
    return kept


def seconds(call: Callable[[], object], repeats: int) -> float:
    """The fastest of several calls, after one that does not count: what the machine does when it is left alone."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(case: Case, gradients: list[dict[str, np.ndarray]], warm: int, repeats: int) -> dict[str, Any]:
    """Bits per element, relative error and times of one compressor."""
    shapes = {f"{n}.{i}": g.shape for i in range(COPIES) for n, g in gradients[0].items()}
    alone = Alone(case, shapes)
    elements = sum(t.n for t in alone.tensors)
    residual = np.zeros(alone.bucket.sparse_size, np.float32)
    errors, bits, densities = [], [], []
    for step in range(warm):
        # Each copy sees the run from another step on.
        parts = [gradients[(step + i) % len(gradients)] for i in range(COPIES)]
        increment = alone.flat({f"{n}.{i}": g for i, part in enumerate(parts) for n, g in part.items()})
        x = residual + increment
        message, count, used = alone.encode(x, step=step, increment=increment)
        decoded = alone.decode(message, count).astype(np.float32)
        alone.algorithm.finish(alone.spec, alone.thresholds, refused=False)
        if case.row.error_feedback:
            residual = x - decoded
        size = HEADER_BYTES + (used if alone.algorithm.varying else message.size)
        bits.append(8 * size / elements)
        densities.append(count / elements)
        errors.append(float(np.linalg.norm(x - decoded) / np.linalg.norm(x)))
    target = np.empty_like(x)
    copy = seconds(lambda: np.copyto(target, x), repeats)
    out = np.zeros(alone.algorithm.max_bytes(alone.spec), np.uint8)

    def decode() -> None:
        got = alone.algorithm.decode(message, count, alone.spec)
        if isinstance(got, SparseValues):
            target[got.positions] += got.values
        else:
            for tensor, values in zip(alone.tensors, got.values, strict=True):
                target[tensor.slice] += values

    assert out.size == message.size
    return {
        "case": str(case),
        "options": case.options,
        "bits_per_element": statistics.mean(bits[warm // 2 :]),
        "density": statistics.mean(densities[warm // 2 :]),
        "relative_error": statistics.mean(errors[warm // 2 :]),
        "elements": elements,
        "encode_s": seconds(lambda: alone.encode(x, step=warm, increment=increment), repeats),
        "decode_s": seconds(decode, repeats),
        "copy_s": copy,
    }


def accuracy(framework: str, name: str, options: dict[str, Any], epochs: int, seed: int) -> dict[str, Any]:
    """Train the example of "torch" or "tensorflow" on two ranks; returns its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        chosen = [part for key, value in options.items() for part in ("--option", f"{key}={value}")]
        command = [
            str(Path(sys.executable).with_name("horovodrun")),
            *("-np", "2", sys.executable, str(ROOT / "examples" / f"{framework}_digits.py"), "--compression", name),
            *("--epochs", str(epochs), "--seed", str(seed), "--json", str(report), *chosen),
        ]
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        return json.loads(report.read_text())


def table(rows: list[dict[str, Any]]) -> str:
    """The results in Markdown."""
    lines = [
        "| compressor | bits an element | entries sent | relative error | encode / copy | decode / copy "
        "| accuracy, torch | accuracy, TensorFlow |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        reached = " | ".join(
            f"{r[key]:.1%}" if r.get(key) is not None else "" for key in ("accuracy", "accuracy_tensorflow")
        )
        if "bits_per_element" not in r:
            lines.append(f"| {r['case']} | 32 | 100 % | 0 | | | {reached} |")
            continue
        lines.append(
            f"| {r['case']} | {r['bits_per_element']:.3g} | {r['density']:.2%} | {r['relative_error']:.2f} "
            f"| {r['encode_s'] / r['copy_s']:.1f} | {r['decode_s'] / r['copy_s']:.1f} | {reached} |"
        )
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Accuracy over size."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "dgc"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for r in rows:
        if r.get("accuracy") is None:
            continue
        bits = r.get("bits_per_element", 32)
        kind = "s" if "bits_per_element" not in r else "o" if Case(r["name"]).row.error_feedback else "^"
        axes.plot(bits, 100 * r["accuracy"], kind, color="black" if kind == "s" else "C0" if kind == "o" else "C1")
        axes.annotate(r["case"], (bits, 100 * r["accuracy"]), xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", xlabel="bits per element on the wire", ylabel="test accuracy, %")
    title = "Digits, 2 ranks, equal steps. Circles: error feedback; triangles: unbiased; square: dense"
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--warm", type=int, default=20, help="steps of error feedback")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--accuracy", action="store_true", help="train the example with every compressor")
    parser.add_argument("--tensorflow", action="store_true", help="the same in TensorFlow, with default options")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--keep", action="store_true", help="keep the accuracies of the last run")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "compressors.json")
    args = parser.parse_args()
    old = json.loads(args.json.read_text())["rows"] if args.keep and args.json.exists() else []
    known = {r["case"]: r for r in old}
    gradients = real_gradients(args.warm + 4)
    rows: list[dict[str, Any]] = [{"case": "dense (none)", "name": "none", "options": {}}]
    rows += [{"name": c.name, **measure(c, gradients, args.warm, args.repeats)} for c in CASES]
    settings = {"epochs": args.epochs, "seeds": args.seeds}

    def write() -> None:
        facts = {
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
            "numpy": np.__version__,
            "numba": numba.__version__,
        }
        args.json.write_text(json.dumps({**facts, **settings, "rows": rows}, indent=1) + "\n")

    for r in rows:
        if args.keep and "accuracy" in known.get(r["case"], {}):
            r.update({k: known[r["case"]][k] for k in ("accuracy", "accuracies", "bytes_total")})
        elif args.accuracy:
            reports = [accuracy("torch", r["name"], r["options"], args.epochs, seed) for seed in args.seeds]
            assert all(report["replicas_identical"] for report in reports), r["case"]
            r["accuracies"] = [report["accuracy"] for report in reports]
            r["accuracy"] = statistics.mean(r["accuracies"])
            r["bytes_total"] = reports[0]["bytes_total"]
            print(r["case"], r["accuracies"], flush=True)
            write()
    for r in rows:
        kept = known.get(r["case"], {}).get("accuracy_tensorflow") if args.keep else None
        if kept is not None:
            r["accuracy_tensorflow"] = kept
        elif args.tensorflow and not r["options"]:
            report = accuracy("tensorflow", r["name"], r["options"], args.epochs, args.seeds[0])
            assert report["replicas_identical"], r["case"]
            r["accuracy_tensorflow"] = report["accuracy"]
            print("tensorflow", r["case"], report["accuracy"], flush=True)
            write()
    write()
    print(table(rows))
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
