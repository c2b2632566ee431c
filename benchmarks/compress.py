"""The compress step against the bare update: ``python benchmarks/compress.py [--model resnet50] [--threads 1 2]``.

The bare update is ``u <- m*u + g; v <- v + u`` in one parallel Numba loop over flat arrays. It moves 20 bytes an
element, and no implementation of momentum correction can take less. The compress step is all that a rank does
before its message leaves: accumulate, select exactly the k largest, encode with the default codecs, mask. Both run in
turn within one process, and the figures are medians; only their ratio means something on a machine that is shared.
``torch.topk`` of the same tensors is timed, too, if PyTorch is installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numba
import numpy as np

from dgc.adapter.warm_up import compiled
from dgc.core.codecs import SparseCodec
from dgc.core.config import DGCConfig, entries_to_send
from dgc.core.exchange.pipeline import clip_factors
from dgc.core.kernels.base import SegmentWork, Selection
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.kernels.threshold import new_thresholds
from dgc.core.layout import Bucket, Layout, Parameter, make_layout

RESULTS = Path(__file__).parent / "results"
MOMENTUM = 0.9
CASES = ("plain", "nesterov", "weight decay", "clipping", "float16", "int2")
"""float16: the gradients; int2: the values of a message, beside positions by Elias-Fano."""


def resnet50() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's 161 tensors in registration order (25.6 M elements)."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, inside, size in ((planes, width, 1), (planes, planes, 3), (4 * planes, planes, 1)):
                shapes += [(out, inside, size, size), (out,), (out,)]
            if block == 0:
                shapes += [(4 * planes, width, 1, 1), (4 * planes,), (4 * planes,)]
            width = 4 * planes
    return [*shapes, (1000, 2048), (1000,)]


def transformer(layers: int = 24, width: int = 1024, vocabulary: int = 30522) -> list[tuple[int, ...]]:
    """Return the shapes of a 340 M-parameter encoder (24 layers of width 1024)."""
    shapes: list[tuple[int, ...]] = [(vocabulary, width), (512, width), (2, width), (width,), (width,)]
    for _ in range(layers):
        for out, inside in ((width, width),) * 4 + ((4 * width, width), (width, 4 * width)):
            shapes += [(out, inside), (out,)]
        shapes += [(width,)] * 4
    return [*shapes, (width, width), (width,)]


MODELS: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "resnet50": resnet50,
    "transformer": transformer,
    "flat": lambda: [(100_000_000, 1)],
}


PAUSE = 0.02
"""Seconds before each timed call, so that OpenMP threads of the one before no longer spin on a core."""


@numba.njit(parallel=True, nogil=True)
def bare_update(g, u, v, m):  # type: ignore[no-untyped-def]
    """Momentum correction and nothing else."""
    for i in numba.prange(g.size):
        x = m * u[i] + g[i]
        u[i] = x
        v[i] += x


class Gradients:
    """Drifting heavy-tailed gradients: each element has a scale of its own, the noise is new at every step."""

    def __init__(self, size: int) -> None:
        """Draw the scales and a pool of noise."""
        rng = np.random.default_rng(0)
        self._scale = np.exp(rng.standard_normal(size, dtype=np.float32)) * np.float32(1e-3)
        self._noise = rng.standard_normal(size, dtype=np.float32)
        self._shifts = rng.integers(1, size, 10_000)
        self.flat = np.empty(size, np.float32)

    def draw(self, step: int) -> None:
        """Fill ``flat`` with the gradient of a step."""
        shift = int(self._shifts[step % len(self._shifts)])
        self.flat[:shift] = self._noise[-shift:]
        self.flat[shift:] = self._noise[:-shift]
        self.flat *= self._scale


class Rank:
    """The compress step of one rank, as the exchange calls it, on all buckets in turn."""

    def __init__(self, layout: Layout, kernels: NumbaKernels, density: float, case: str, g: np.ndarray) -> None:
        """Allocate the state. ``g`` holds the sparsified tensors one after the other."""
        self._kernels = kernels
        self._case = case
        self.steps = self.exact = self.tensors = 0
        flat = g.astype(np.float16) if case == "float16" else g
        parameters = np.full(g.size, 0.01, np.float32) if case == "weight decay" else None
        self._source, self._flat = g, flat
        self._buckets = []
        start = 0
        for bucket in layout.buckets:
            ks = [entries_to_send(s.length, density) for s in bucket.sparse]
            gradients, decayed = [], []
            for segment in bucket.sparse:
                gradients.append(flat[start : start + segment.length])
                decayed.append(None if parameters is None else parameters[start : start + segment.length])
                start += segment.length
            if ks:
                codecs = ("elias_fano", "int2") if case == "int2" else ("uint16", "float16")
                self._buckets.append(_BucketState(bucket, kernels, ks, gradients, decayed, codecs))

    def refresh(self) -> None:
        """Take over a new gradient (not timed)."""
        if self._flat is not self._source:
            np.copyto(self._flat, self._source, casting="same_kind")

    def step(self) -> None:
        """Accumulate, select, encode, mask; other threads begin with a bucket while the one before is encoded."""
        begun = self._begin(self._buckets[0])
        for b, following in zip(self._buckets, [*self._buckets[1:], None], strict=True):
            meanwhile = begun if following is None else self._begin(following)
            chosen = begun()
            begun = meanwhile
            b.chosen = chosen.positions
            decoded = b.codec.encode(chosen.positions, chosen.values, b.payload)
            self._kernels.take_out(b.u, b.v, chosen.positions, decoded, masking=True)

    def _begin(self, b: _BucketState) -> Callable[[], Selection]:
        kernels = self._kernels
        scales = [1.0] * len(b.ks)
        if self._case == "clipping":
            scales = clip_factors(kernels.sums_of_squares(b.gradients), 1.0, 4)
        nesterov, decay = self._case == "nesterov", 1e-4 if self._case == "weight decay" else 0.0
        work = [
            SegmentWork(g, p, s.offset, s.length, k, MOMENTUM, nesterov, decay, scale)
            for s, k, g, p, scale in zip(b.bucket.sparse, b.ks, b.gradients, b.parameters, scales, strict=True)
        ]
        return kernels.begin_selection(work, b.u, b.v, b.thresholds)

    def count(self) -> None:
        """Count the tensors that sent exactly k entries (not timed)."""
        for b in self._buckets:
            sent = np.diff(np.searchsorted(b.chosen, b.bucket.sparse_offsets))
            self.exact += int(np.sum(sent == b.ks))
            self.tensors += len(b.ks)


@dataclass
class _BucketState:
    bucket: Bucket
    kernels: NumbaKernels
    ks: list[int]
    gradients: list[np.ndarray]
    parameters: list[np.ndarray | None]
    codecs: tuple[str, str]
    chosen: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        self.u = np.zeros(self.bucket.size, np.float32)
        self.v = np.zeros(self.bucket.sparse_size, np.float32)
        self.thresholds = new_thresholds(len(self.ks))
        self.codec = SparseCodec(self.bucket, sum(self.ks), *self.codecs)
        self.payload = np.empty(self.codec.max_bytes, np.uint8)


@dataclass
class Row:
    """One case: milliseconds (median), and its ratio to the bare update of the same run."""

    case: str
    density: float
    threads: int
    milliseconds: float
    ratio: float
    first_milliseconds: float
    exact_share: float


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(
    shapes: list[tuple[int, ...]], density: float, threads: int, cases: list[str], repeats: int, warm: int, topk: bool
) -> list[Row]:
    """Run all cases in turn, ``warm`` untimed rounds and ``repeats`` timed ones."""
    layout = make_layout(
        [Parameter(str(i), shape, "float32") for i, shape in enumerate(shapes)], DGCConfig(momentum=MOMENTUM)
    )
    gradients = Gradients(layout.sparse_numel)
    g = gradients.flat
    gradients.draw(0)
    kernels = NumbaKernels(threads)
    numba.set_num_threads(threads)
    u, v = np.zeros_like(g), np.zeros_like(g)
    ranks = {case: Rank(layout, kernels, density, case, g) for case in cases}
    calls: dict[str, Callable[[], object]] = {"bare update": lambda: bare_update(g, u, v, np.float32(MOMENTUM))}
    calls |= {case: rank.step for case, rank in ranks.items()}
    if topk:
        calls["torch.topk"] = _topk(layout, g, density, threads)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for step in range(warm + repeats):
        gradients.draw(step)
        for rank in ranks.values():
            rank.refresh()
        for name, call in calls.items():
            if name == "torch.topk" and step < warm:
                continue
            time.sleep(PAUSE)
            times[name].append(timed(call))
            if name in ranks and step >= warm:
                ranks[name].count()
    medians = {name: statistics.median(t[-repeats:]) for name, t in times.items()}
    return [
        Row(
            case=name,
            density=density,
            threads=threads,
            milliseconds=1e3 * medians[name],
            ratio=medians[name] / medians["bare update"],
            first_milliseconds=1e3 * times[name][0],
            exact_share=ranks[name].exact / ranks[name].tensors if name in ranks else 1.0,
        )
        for name in calls
    ]


def _topk(layout: Layout, g: np.ndarray, density: float, threads: int) -> Callable[[], object]:
    import torch

    torch.set_num_threads(threads)
    tensors, start = [], 0
    for bucket in layout.buckets:
        for s in bucket.sparse:
            tensors.append((torch.from_numpy(g[start : start + s.length]), entries_to_send(s.length, density)))
            start += s.length
    return lambda: [torch.topk(t.abs(), k, sorted=False) for t, k in tensors]


def environment() -> dict[str, Any]:
    """Return what the figures depend on."""
    packages = {}
    for name in ("numpy", "numba", "llvmlite", "torch"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    model = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": model or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
        **packages,
    }


def plot(rows: list[Row], path: Path, title: str) -> None:
    """Draw the ratios to the bare update."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    groups = sorted({(r.density, r.threads) for r in rows})
    cases = [c for c in dict.fromkeys(r.case for r in rows) if c not in ("bare update", "torch.topk")]
    figure, axes = plt.subplots(figsize=(8, 4))
    for i, (density, threads) in enumerate(groups):
        ratio = {r.case: r.ratio for r in rows if (r.density, r.threads) == (density, threads)}
        places = [c + 0.8 * (i - len(groups) / 2) / len(groups) for c in range(len(cases))]
        label = f"{density:.1%}, {threads} thread{'s' if threads > 1 else ''}"
        axes.bar(places, [ratio[c] for c in cases], 0.8 / len(groups), align="edge", label=label)
    axes.axhline(1.0, color="black", linewidth=1, label="bare update")
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylabel("time / bare update")
    axes.set_title(title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Print a table, and write JSON (and a plot) into the results folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.001, 0.01])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds")
    parser.add_argument("--warm", type=int, default=20, help="rounds before the timed ones")
    parser.add_argument("--no-topk", action="store_true", help="leave torch.topk out")
    parser.add_argument("--plot", action="store_true", help="draw the ratios, too")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go")
    options = parser.parse_args()
    shapes = MODELS[options.model]()
    kernels = compiled(DGCConfig(), lambda: NumbaKernels(max(options.threads)), lambda made: made)
    print(f"{options.model}: {len(shapes)} tensors; {kernels.describe()}")
    print(f"{'density':>8} {'threads':>7} {'case':<14} {'ms':>9} {'ratio':>7} {'first ms':>9} {'exact':>8}")
    rows: list[Row] = []
    for density in options.densities:
        for threads in options.threads:
            new = measure(shapes, density, threads, options.cases, options.repeats, options.warm, not options.no_topk)
            for r in new:
                print(
                    f"{r.density:8.1%} {r.threads:7} {r.case:<14} {r.milliseconds:9.2f} {r.ratio:7.2f} "
                    f"{r.first_milliseconds:9.1f} {r.exact_share:8.2%}",
                    flush=True,
                )
            rows += new
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"compress-{options.model}.json"
    figures = {"model": options.model, "environment": environment()}
    path.write_text(json.dumps({**figures, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    if options.plot:
        plot(rows, path.with_suffix(".png"), f"{options.model}: compress step / bare update")


if __name__ == "__main__":
    main()
