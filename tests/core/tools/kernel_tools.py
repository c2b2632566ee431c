"""Problems for the kernels, and what must hold for every selection."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np

from dgc.core.kernels import threads as threads_module
from dgc.core.kernels.base import Kernels, SegmentWork
from dgc.core.kernels.reference import ReferenceKernels, top_k
from dgc.core.kernels.threshold import new_thresholds

FLAGS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "weight_decay": 0.01},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "scale": 0.37},
    {"weight_decay": 0.1, "scale": 3.0},
    {"momentum": 0.5, "scale": 1 / 1024},
]

LENGTHS = [0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 1000, 4095, 4096, 4097, 4200, 9000, 32768, 33000, 70001]

KINDS = ["normal", "heavy", "ties", "constant", "zeros", "sparse", "tiny", "huge", "bad", "halves"]


def entries(rng: np.random.Generator, kind: str, n: int) -> np.ndarray:
    """(n,) float64 of one of KINDS: what gradients are, and what they should not be."""
    x = rng.standard_normal(n)
    if kind == "heavy":
        return x * np.exp(2 * rng.standard_normal(n)) * 1e-3
    if kind == "ties":
        return np.round(x)
    if kind == "constant":
        return np.full(n, -0.25)
    if kind == "zeros":
        return np.zeros(n)
    if kind == "sparse":
        return np.where(rng.random(n) < 0.002, x, 0.0)
    if kind == "tiny":
        return x * 1e-41
    if kind == "huge":
        return x * 1e38
    if kind == "bad":
        x[rng.random(n) < 0.01] = np.nan
        x[rng.random(n) < 0.01] = np.inf
        x[rng.random(n) < 0.01] = -np.inf
    if kind == "halves":
        return x * 10.0 ** rng.integers(-9, 5, n)
    return x


def as_type(x: np.ndarray, dtype: str) -> np.ndarray:
    """``x`` in a float type; "bfloat16" as its bits, cut off."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "bfloat16":
            return (x.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return x.astype(dtype)


def offsets_of(lengths: list[int], alignment: int = 16) -> tuple[list[int], int]:
    """Where segments of these lengths begin, and the size of the bucket."""
    offsets, end = [], 0
    for n in lengths:
        offsets.append(end)
        end += -(-n // alignment) * alignment
    return offsets, end


def bits(x: np.ndarray) -> np.ndarray:
    """The integers that the floats are, for comparisons that tell 0.0 from -0.0."""
    return x.view(np.int32 if x.itemsize == 4 else np.int64)


def check_selection(v: np.ndarray, w: SegmentWork, chosen: np.ndarray) -> bool:
    """Check one segment's bucket-flat positions against its v, (length,), before masking; returns whether exact."""
    expected = top_k(v, w.k)
    own = chosen - w.offset
    if len(own) == len(expected):
        np.testing.assert_array_equal(own, expected)
        return True
    assert 0.8 * w.k <= len(own) < w.k
    np.testing.assert_array_equal(own, top_k(v, len(own)))
    return False


def same_bits(a, b):
    """Equal bit for bit, except that one NaN is as good as another."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    kind = f"u{a.dtype.itemsize}"
    different = (a.view(kind) != b.view(kind)) & ~(np.isnan(a) & np.isnan(b))
    assert not different.any(), (np.flatnonzero(different)[:5], a[different][:5], b[different][:5])


def assert_same_selection(got, wanted):
    np.testing.assert_array_equal(got.positions, wanted.positions)
    assert got.positions.dtype == np.int64
    same_bits(got.values, wanted.values)


class Bucket:
    """A bucket's state twice: on the device (through ``to_device`` and ``to_host``) and for the reference."""

    def __init__(self, lengths, kernels, to_device=np.array, to_host=np.array):
        offsets, n = offsets_of(lengths)
        self.lengths, self.offsets = lengths, np.array([*offsets, n])
        self.kernels, self.reference = kernels, ReferenceKernels()
        self.to_device, self.to_host = to_device, to_host
        self.u, self.v = np.zeros(n, np.float32), np.zeros(n, np.float32)
        self.device_u, self.device_v = to_device(self.u), to_device(self.v)
        self.thresholds = new_thresholds(len(lengths))

    def work(self, gradients, parameters, options):
        """The same work for the device and for the reference."""
        mine, theirs = [], []
        for i, length in enumerate(self.lengths):
            o = options[i] if isinstance(options, list) else options
            g, p = gradients[i], None if parameters is None else parameters[i]
            common = dict(offset=int(self.offsets[i]), length=length, **o)
            mine.append(SegmentWork(self.to_device(g), None if p is None else self.to_device(p), **common))
            theirs.append(SegmentWork(g, p, **common))
        return mine, theirs

    def assert_same_state(self):
        same_bits(self.to_host(self.device_u), self.u)
        same_bits(self.to_host(self.device_v), self.v)


class Trainee:
    """One tensor that is compressed step after step, each selection checked; ``exact`` counts those of k entries."""

    def __init__(self, kernels: Kernels, n: int, k: int, **flags: object) -> None:
        """Start from zeros."""
        self.kernels = kernels
        self.n, self.k, self.flags = n, k, flags
        self.u, self.v = np.zeros(n, np.float32), np.zeros(n, np.float32)
        self.thresholds = new_thresholds(1)
        self.exact = self.most_short_in_a_row = self._short = 0

    def step(self, gradient: np.ndarray, k: int | None = None) -> np.ndarray:
        """Accumulate, select, check, mask; returns the positions."""
        work = SegmentWork(gradient, None, 0, self.n, k or self.k, **self.flags)
        chosen = self.kernels.accumulate_and_select([work], self.u, self.v, self.thresholds)
        np.testing.assert_array_equal(chosen.values, self.v[chosen.positions])
        exact = check_selection(self.v, work, chosen.positions)
        self.exact += exact
        self._short = 0 if exact else self._short + 1
        self.most_short_in_a_row = max(self.most_short_in_a_row, self._short)
        self.kernels.take_out(self.u, self.v, chosen.positions, chosen.values, masking=True)
        return chosen.positions


class Pieces:
    """A kernel whose pieces take a while, and which fails on one worker."""

    def __init__(self):
        self.lock, self.working = threading.Lock(), []

    def __call__(self, worker, progress, pieces, fails):
        while True:
            with self.lock:
                if progress[0] >= pieces:
                    return
                piece = int(progress[0])
                progress[0] += 1
            self.working.append(piece)
            time.sleep(0.05)
            self.working.remove(piece)
            if worker == fails:
                raise MemoryError("no room")
            with self.lock:
                progress[1] += 1


ROOT = Path(__file__).parents[3]
LAUNCHER_VARIABLES = (threads_module.THREADS_VARIABLE, *threads_module.LOCAL_SIZE_VARIABLES)


def run_script(text, **environment):
    """Run Python code in a process of its own."""
    env = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES and not k.startswith("NUMBA_")}
    paths = [str(ROOT), str(ROOT / "tests/core/tools")]
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={**env, "PYTHONPATH": os.pathsep.join(paths), **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
