"""The compress step on a GPU against the bare update: ``python benchmarks/compress_gpu.py [--model resnet50]``.

The bare update is ``u <- m*u + g; v <- v + u`` in one kernel over flat arrays. It moves 20 bytes an element, and no
implementation of momentum correction can take less. The compress step is all that a rank does before
its message leaves: accumulate, select exactly the k largest, encode with the default codecs, mask, and the message is
in host memory. Both run in turn; a figure is the median of what the host's clock says from the first launch to the end
of the last wait. ``torch.topk`` of the same tensors is timed, too, if PyTorch finds the device.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from compress import MODELS, MOMENTUM, RESULTS, Row, plot

from dgc.core.codecs import SparseCodec
from dgc.core.config import DGCConfig, entries_to_send
from dgc.core.kernels.base import SegmentWork
from dgc.core.kernels.device import DeviceKernels
from dgc.core.kernels.gpu import CupyKernels
from dgc.core.kernels.threshold import new_thresholds
from dgc.core.layout import Bucket, Layout, Parameter, make_layout

CASES = ("plain", "nesterov", "weight decay", "float16", "bfloat16")

BARE = r"""
extern "C" __global__ void bare(const float4* g, float4* u, float4* v, float m, long long n) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float4 a = g[i];
    float4 b = u[i], c = v[i];
    b.x = m * b.x + a.x, b.y = m * b.y + a.y, b.z = m * b.z + a.z, b.w = m * b.w + a.w;
    c.x += b.x, c.y += b.y, c.z += b.z, c.w += b.w;
    u[i] = b;
    v[i] = c;
}
"""


class Gradients:
    """Drifting heavy-tailed gradients: each element has a scale of its own, the noise is new at every step."""

    def __init__(self, size: int, kernels: DeviceKernels) -> None:
        """Draw the scales and a pool of noise, on the host."""
        rng = np.random.default_rng(0)
        self._scale = np.exp(rng.standard_normal(size, dtype=np.float32)) * np.float32(1e-3)
        self._noise = rng.standard_normal(size, dtype=np.float32)
        self._shifts = np.random.default_rng(0).integers(1, size, 10_000)
        self._memory = kernels.memory
        self.host = np.empty(size, np.float32)
        self.flat = kernels.memory.zeros(size, np.float32)

    def draw(self, step: int) -> None:
        """Fill ``host`` and ``flat`` with the gradient of a step."""
        shift = int(self._shifts[step % len(self._shifts)])
        self.host[:shift] = self._noise[-shift:]
        self.host[shift:] = self._noise[:-shift]
        self.host *= self._scale
        self._memory.copy_in(self.flat, self.host)


class BucketState:
    """One bucket of one case."""

    def __init__(self, bucket: Bucket, kernels: DeviceKernels, ks: list[int], work: list[SegmentWork]) -> None:
        """Allocate the state."""
        self.work, self.ks = work, ks
        self.u = kernels.memory.zeros(bucket.size, np.float32)
        self.v = kernels.memory.zeros(bucket.sparse_size, np.float32)
        self.thresholds = new_thresholds(len(ks))
        self.codec = SparseCodec(bucket, sum(ks), DGCConfig.indices, DGCConfig().value_codec)
        self.payload = np.empty(self.codec.max_bytes, np.uint8)
        self.sent = 0


class Rank:
    """The compress step of one rank, as the exchange calls it, on all buckets in turn."""

    def __init__(self, layout: Layout, kernels: DeviceKernels, density: float, case: str, gradients: Gradients) -> None:
        """Allocate the state. The gradients are those of the sparsified tensors, one after the other."""
        self._kernels, self._source, self._case = kernels, gradients.host, case
        self._kind = {"float16": np.float16, "bfloat16": np.uint16}.get(case, np.float32)
        size = gradients.host.size
        self._flat = gradients.flat if self._kind is np.float32 else kernels.memory.zeros(size, self._kind)
        decayed = kernels.memory.zeros(size, np.float32) if case == "weight decay" else None
        self.buckets: list[BucketState] = []
        self.exact = self.steps = 0
        start = 0
        for bucket in layout.buckets:
            ks = [entries_to_send(s.length, density) for s in bucket.sparse]
            work = []
            for segment, k in zip(bucket.sparse, ks, strict=True):
                inside = slice(start, start + segment.length)
                start += segment.length
                work.append(
                    SegmentWork(
                        self._flat[inside],
                        None if decayed is None else decayed[inside],
                        segment.offset,
                        segment.length,
                        k,
                        MOMENTUM,
                        case == "nesterov",
                        0.0 if decayed is None else 1e-4,
                    )
                )
            if ks:
                self.buckets.append(BucketState(bucket, kernels, ks, work))

    def refresh(self) -> None:
        """Take over a new gradient (not timed)."""
        if self._case == "bfloat16":
            self._kernels.memory.copy_in(self._flat, (self._source.view(np.uint32) >> 16).astype(np.uint16))
        elif self._case == "float16":
            self._kernels.memory.copy_in(self._flat, self._source)

    def step(self) -> None:
        """Accumulate, select, bring the entries to the host and encode them."""
        begun = [self._kernels.begin_selection(b.work, b.u, b.v, b.thresholds) for b in self.buckets]
        for b, finish in zip(self.buckets, begun, strict=True):
            chosen = finish()
            b.codec.encode(chosen.positions, chosen.values, b.payload)
            b.sent = chosen.positions.size

    def count(self) -> None:
        """Count the buckets that sent exactly what they were to send (not timed)."""
        self.exact += sum(b.sent == sum(b.ks) for b in self.buckets)
        self.steps += len(self.buckets)


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of one call, from an idle device to an idle device."""
    cupy.cuda.Device().synchronize()
    start = time.perf_counter()
    call()
    cupy.cuda.Device().synchronize()
    return time.perf_counter() - start


def measure(
    shapes: list[tuple[int, ...]], kernels: DeviceKernels, density: float, cases: list[str], repeats: int, warm: int
) -> list[Row]:
    """Run all cases in turn, ``warm`` untimed rounds and ``repeats`` timed ones."""
    layout = make_layout(
        [Parameter(str(i), shape, "float32") for i, shape in enumerate(shapes)], DGCConfig(momentum=MOMENTUM)
    )
    gradients = Gradients(layout.sparse_numel, kernels)
    g = gradients.flat
    u, v = (kernels.memory.zeros(g.size, np.float32) for _ in range(2))
    bare = cupy.RawKernel(BARE, "bare")
    fours = g.size // 4
    arguments = (g, u, v, np.float32(MOMENTUM), np.int64(fours))
    calls: dict[str, Callable[[], object]] = {"bare update": lambda: bare((-(-fours // 256),), (256,), arguments)}
    ranks = {case: Rank(layout, kernels, density, case, gradients) for case in cases}
    calls |= {case: rank.step for case, rank in ranks.items()}
    topk = _topk(layout, g, density)
    if topk is not None:
        calls["torch.topk"] = topk
    times: dict[str, list[float]] = {name: [] for name in calls}
    for step in range(warm + repeats):
        gradients.draw(step)
        for rank in ranks.values():
            rank.refresh()
        for name, call in calls.items():
            times[name].append(timed(call))
            if name in ranks and step >= warm:
                ranks[name].count()
    medians = {name: statistics.median(t[-repeats:]) for name, t in times.items()}
    return [
        Row(
            case=name,
            density=density,
            threads=0,
            milliseconds=1e3 * medians[name],
            ratio=medians[name] / medians["bare update"],
            first_milliseconds=1e3 * times[name][0],
            exact_share=ranks[name].exact / ranks[name].steps if name in ranks else 1.0,
        )
        for name in calls
    ]


def _topk(layout: Layout, g: Any, density: float) -> Callable[[], object] | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    flat, tensors, start = torch.from_dlpack(g), [], 0
    for bucket in layout.buckets:
        for s in bucket.sparse:
            tensors.append((flat[start : start + s.length], entries_to_send(s.length, density)))
            start += s.length
    return lambda: [torch.topk(t.abs(), k, sorted=False) for t, k in tensors]


def environment(kernels: CupyKernels) -> dict[str, Any]:
    """Return what the figures depend on."""
    packages = {}
    for name in ("numpy", "numba", "cupy-cuda12x", "cupy-cuda13x", "torch"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": kernels.describe(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "runtime": cupy.cuda.runtime.runtimeGetVersion(),
        **packages,
    }


def main() -> None:
    """Print a table, and write JSON (and a plot) into the results folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.001, 0.01])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds")
    parser.add_argument("--warm", type=int, default=20, help="rounds before the timed ones")
    parser.add_argument("--plot", action="store_true", help="draw the ratios, too")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go")
    options = parser.parse_args()
    shapes = MODELS[options.model]()
    start = time.perf_counter()
    kernels = CupyKernels(0)
    warm_up = time.perf_counter() - start
    print(f"{options.model}: {len(shapes)} tensors; {kernels.describe()}; warm-up {warm_up:.1f} s")
    print(f"{'density':>8} {'case':<14} {'ms':>9} {'ratio':>7} {'first ms':>9} {'exact':>8}")
    rows: list[Row] = []
    for density in options.densities:
        new = measure(shapes, kernels, density, options.cases, options.repeats, options.warm)
        for r in new:
            print(
                f"{r.density:8.1%} {r.case:<14} {r.milliseconds:9.3f} {r.ratio:7.2f} {r.first_milliseconds:9.2f} "
                f"{r.exact_share:8.2%}",
                flush=True,
            )
        rows += new
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"compress-gpu-{options.model}.json"
    figures = {"model": options.model, "environment": environment(kernels), "warm_up_seconds": warm_up}
    path.write_text(json.dumps({**figures, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    if options.plot:
        plot(rows, path.with_suffix(".png"), f"{options.model}: compress step / bare update")


if __name__ == "__main__":
    main()
