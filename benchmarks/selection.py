"""Is the selection exactly the top k, and what memory does a step take? ``python benchmarks/selection.py``.

Selection: the compress step on real training gradients (the network of ``examples/torch_digits.py`` on scikit-learn's
digits, the whole run with its ramp-up) and on the tensors of ResNet-50 with drifting heavy-tailed gradients for 200
steps. After every step each tensor's entries are compared with the NumPy oracle's choice from the same v.

Memory: the peak resident memory of one process, above what it had before the state was made, for one flat tensor of
100 million elements, and of one rank of the example.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from compress import Gradients, environment, resnet50

from dgc.core.config import DGCConfig, Schedule, entries_to_send
from dgc.core.kernels.base import SegmentWork
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.kernels.reference import top_k
from dgc.core.kernels.threshold import new_thresholds
from dgc.core.layout import Layout, Parameter, make_layout

HERE = Path(__file__).parent
FLAT = 100_000_000
MIB = 2**20

Steps = Iterator[tuple[float, list[np.ndarray]]]


class Tally:
    """Tensor-steps: how many there were, were exact, and fell short by how much."""

    def __init__(self) -> None:
        """Start at zero."""
        self.tensor_steps = self.exact = self.too_many = self.short_in_a_row = 0
        self.worst_shortfall = 0.0
        self._short: set[str] = set()

    def add(self, name: str, sent: np.ndarray, expected: np.ndarray) -> None:
        """Compare the positions sent with the oracle's, both ascending."""
        self.tensor_steps += 1
        self.exact += np.array_equal(sent, expected)
        self.too_many += len(sent) > len(expected)
        if len(sent) < len(expected):
            self.worst_shortfall = max(self.worst_shortfall, 1 - len(sent) / len(expected))
            self.short_in_a_row += name in self._short
            self._short.add(name)
        else:
            self._short.discard(name)

    def report(self) -> dict[str, float]:
        """The counts by name."""
        counts = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {**counts, "exact_share": self.exact / self.tensor_steps}


def select(layout: Layout, steps: Steps) -> dict[str, float]:
    """Run the compress step without a transport on the gradients of the sparsified tensors."""
    kernels, tally = NumbaKernels(2), Tally()
    states = []
    for bucket in layout.buckets:
        u, v = np.zeros(bucket.size, np.float32), np.zeros(bucket.sparse_size, np.float32)
        states.append((bucket, u, v, new_thresholds(len(bucket.sparse))))
    for density, gradients in steps:
        given = iter(gradients)
        for bucket, u, v, thresholds in states:
            work = [
                SegmentWork(next(given), None, s.offset, s.length, entries_to_send(s.length, density), 0.9)
                for s in bucket.sparse
            ]
            if not work:
                continue
            chosen = kernels.accumulate_and_select(work, u, v, thresholds)
            for w, s in zip(work, bucket.sparse, strict=True):
                inside = (chosen.positions >= w.offset) & (chosen.positions < w.offset + w.length)
                expected = w.offset + top_k(v[w.offset : w.offset + w.length], w.k)
                tally.add(str(s.parameter), chosen.positions[inside], np.sort(expected))
            kernels.take_out(u, v, chosen.positions, chosen.values, masking=True)
    return tally.report()


def on_resnet50() -> dict[str, float]:
    """200 steps at 0.1 %."""
    layout = make_layout([Parameter(str(i), s, "float32") for i, s in enumerate(resnet50())], DGCConfig(momentum=0.9))
    gradients = Gradients(layout.sparse_numel)
    lengths = [s.length for b in layout.buckets for s in b.sparse]

    def steps() -> Steps:
        for step in range(200):
            gradients.draw(step)
            yield 0.001, np.split(gradients.flat, np.cumsum(lengths)[:-1])

    return select(layout, steps())


def on_the_example(seed: int, epochs: int = 40, batch: int = 32) -> dict[str, float]:
    """One rank's gradients over the whole training of the digits network, ramp-up included."""
    import torch
    import torch.nn.functional as F

    spec = importlib.util.spec_from_file_location("torch_digits", HERE.parent / "examples/torch_digits.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(seed)
    model = example.Net()
    config = DGCConfig(momentum=0.9)
    schedule = Schedule(tuple(example.PAPER_WARMUP), length=140)
    named = list(model.named_parameters())
    layout = make_layout([Parameter(n, tuple(p.shape), "float32") for n, p in named], config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9, weight_decay=1e-4)
    train, _ = example.load_images()
    loader = torch.utils.data.DataLoader(train, batch, shuffle=True, drop_last=True)

    def steps() -> Steps:
        step = 0
        for _ in range(epochs):
            for images, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                gradients = [p.grad.detach().numpy().reshape(-1) for _, p in named]
                yield schedule.density(step), [gradients[s.parameter] for b in layout.buckets for s in b.sparse]
                optimizer.step()
                step += 1

    return select(layout, steps())


def flat_memory() -> dict[str, float]:
    """Peak memory of a step on one tensor of 100 million elements, in bytes per element by what it is for."""
    g = np.random.default_rng(0).standard_normal(FLAT, np.float32)
    kernels = NumbaKernels(2)

    def train(n: int) -> None:
        u, v, thresholds = np.zeros(n, np.float32), np.zeros(n, np.float32), new_thresholds(1)
        for _ in range(3):
            chosen = kernels.accumulate_and_select([SegmentWork(g[:n], None, 0, n, n // 1000, 0.9)], u, v, thresholds)
            kernels.take_out(u, v, chosen.positions, chosen.values, masking=True)

    train(FLAT // 1000)  # which compiles
    before = _peak()
    train(FLAT)
    extra = _peak() - before
    return {"elements": FLAT, "u_and_v_MiB": 8 * FLAT / MIB, "u_v_and_workspaces_MiB": extra / MIB}


def example_memory(compression: str) -> float:
    """Peak MiB of one rank of the example, launched on two."""
    with tempfile.TemporaryDirectory() as folder:
        code = (
            "import os, resource, runpy, sys\n"
            "sys.argv = ['torch_digits.py', '--epochs', '3', '--compression', sys.argv[1]]\n"
            f"runpy.run_path({str(HERE.parent / 'examples/torch_digits.py')!r}, run_name='__main__')\n"
            "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            f"open({folder!r} + '/' + str(os.getpid()), 'w').write(str(peak))\n"
        )
        script = Path(folder) / "measured.py"
        script.write_text(code)
        command = ["horovodrun", "-np", "2", sys.executable, str(script), compression]
        subprocess.run(command, capture_output=True, check=True)
        return max(int(file.read_text()) for file in Path(folder).glob("[0-9]*")) / 1024


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "selection-cpu.json")
    out = parser.parse_args().out
    parts: dict[str, Callable[[], object]] = {
        "memory_of_a_flat_step": flat_memory,
        "peak_MiB_of_a_rank_of_the_example": lambda: {name: example_memory(name) for name in ("none", "dgc")},
        "training_gradients_of_the_example": lambda: {f"seed {seed}": on_the_example(seed) for seed in (1, 2, 3)},
        "resnet50_shapes_200_steps": on_resnet50,
    }
    results: dict[str, object] = {"environment": environment()}
    for name, part in parts.items():
        results[name] = part()
        print(name, json.dumps(results[name], indent=1), flush=True)
        out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
