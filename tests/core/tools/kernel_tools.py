"""Problems for the kernels, and what must hold for every selection."""

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dgc.core.kernels import threads as threads_module
from dgc.core.kernels.base import Kernels, SegmentWork
from dgc.core.kernels.reference import top_k
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


def check_selection(v: np.ndarray, w: SegmentWork, chosen: np.ndarray, *, exact: bool = False) -> bool:
    """Check one segment's bucket-flat positions against its v, (length,), before masking; returns whether exact."""
    expected = top_k(v, w.k)
    own = chosen - w.offset
    if len(own) == len(expected):
        np.testing.assert_array_equal(own, expected)
        return True
    assert not exact, f"{len(own)} of {w.k}"
    assert 0.8 * w.k <= len(own) < w.k
    np.testing.assert_array_equal(own, top_k(v, len(own)))
    return False


@dataclass
class Tally:
    """How many selections there were, how many were exactly the k largest, how many came short."""

    steps: int = 0
    exact: int = 0
    short_in_a_row: int = 0


class Trainee:
    """One tensor that is compressed step after step, each selection checked."""

    def __init__(self, kernels: Kernels, n: int, k: int, **flags: object) -> None:
        """Start from zeros."""
        self.kernels = kernels
        self.n, self.k, self.flags = n, k, flags
        self.u, self.v = np.zeros(n, np.float32), np.zeros(n, np.float32)
        self.thresholds = new_thresholds(1)
        self.tally = Tally()
        self.sent = np.zeros(n, np.float32)
        self._short = 0

    def step(self, gradient: np.ndarray, k: int | None = None) -> np.ndarray:
        """Accumulate, select, check, mask; returns the positions."""
        work = SegmentWork(gradient, None, 0, self.n, k or self.k, **self.flags)
        chosen = self.kernels.accumulate_and_select([work], self.u, self.v, self.thresholds)
        np.testing.assert_array_equal(chosen.values, self.v[chosen.positions])
        exact = check_selection(self.v, work, chosen.positions)
        self.tally.steps += 1
        self.tally.exact += exact
        self._short = 0 if exact else self._short + 1
        self.tally.short_in_a_row = max(self.tally.short_in_a_row, self._short)
        self.kernels.take_out(self.u, self.v, chosen.positions, chosen.values, masking=True)
        return chosen.positions


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
