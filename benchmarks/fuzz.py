"""Damaged messages of every codec and every compressor: each is refused, or decodes within its bounds.

    python benchmarks/fuzz.py --messages 1000000

Numba's loops run with bounds checks, so that a read or write outside an array is an exception and not luck.
Writes ``benchmarks/results/fuzz.json``.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if os.environ.get("NUMBA_BOUNDSCHECK") != "1":
    # Before Numba is imported; compiled code without the checks must not be found in the cache.
    os.environ.update(NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=tempfile.mkdtemp(prefix="fuzz-"))
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "core" / "tools")]

import numba  # noqa: E402
import numpy as np  # noqa: E402
from contract_tools import CASES, Alone, Case  # noqa: E402

from dgc.core.codecs import INDEX_CODECS, VALUE_CODECS, check_positions, padded  # noqa: E402
from dgc.core.compressors import SparseValues  # noqa: E402
from dgc.core.message import HEADER_BYTES, Form, Messages, RemoteFailure  # noqa: E402
from dgc.errors import DGCError  # noqa: E402
from dgc.transport.local import local_world  # noqa: E402

SHAPES = {"conv": (6, 3, 3, 3), "fc": (19, 21), "head": (3, 5)}


class Target:
    """One compressor's whole messages: header, payload, checks and decoding as in a step."""

    def __init__(self, case: Case) -> None:
        self.alone = alone = Alone(case, SHAPES)
        algorithm, spec = alone.algorithm, alone.spec
        ids = (algorithm.number, *algorithm.codec_ids(spec))
        form = Form(ids, sum(algorithm.max_counts(spec)), padded(algorithm.max_bytes(spec)))
        self.sender = Messages(form, 0, local_world(1)[0])
        self.messages = [self._message(step) for step in range(4)]

    def _message(self, step: int) -> np.ndarray:
        alone = self.alone
        payload, count, _ = alone.encode(alone.random(step), step=step)
        self.sender.start(5, fingerprint=77)
        self.sender.payload[: payload.size] = payload
        self.sender.finish(count=count, nonfinite=False)
        self.sender.exchange()
        return self.sender._gathered[0].copy()

    def read(self, message: np.ndarray) -> str:
        """Receive and decode; returns "refused" or "decoded", raises what should never be raised."""
        self.sender._gathered = message[None]
        try:
            incoming = self.sender.receive()[0]
            decoded = self.alone.algorithm.decode(incoming.payload, incoming.count, self.alone.spec)
        except (DGCError, RemoteFailure):
            return "refused"
        spec = self.alone.spec
        if isinstance(decoded, SparseValues):
            assert decoded.positions.shape == decoded.values.shape
            check_positions(decoded.positions, spec.size, "fuzz")
            spec.bucket.bounds(decoded.positions)
        else:
            assert [v.size for v in decoded.values] == [t.n for t in spec.tensors]
        return "decoded"


def mutate(message: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Flip bits, overwrite stretches, move bytes, or cut the message short; anywhere, but more often in its front."""
    out = message.copy()
    # The header is one part in many bytes: a third of the damage is done there, the rest in the payload.
    low, high = (0, HEADER_BYTES) if rng.random() < 0.33 else (HEADER_BYTES, out.size)
    kind = rng.integers(6)
    at = int(rng.integers(low, high))
    length = int(rng.integers(1, 9))
    if kind == 0:
        out[at] ^= np.uint8(1 << rng.integers(8))
    elif kind == 1:
        out[at : at + length] = rng.integers(0, 256, out[at : at + length].size)
    elif kind == 2:
        out[at : at + length] = rng.choice([0, 0xFF, 0x7F, 0x80])
    elif kind == 3:
        out[at:high] = np.roll(out[at:high], length)
    elif kind == 4:
        out[HEADER_BYTES:] = rng.integers(0, 256, out.size - HEADER_BYTES)
    else:
        out = out[:at]
    return out


def targets() -> dict[str, Target]:
    """Every case of the contract tests, and every pair of codecs."""
    found = {str(case): Target(case) for case in CASES}
    for indices in INDEX_CODECS:
        for values in VALUE_CODECS:
            case = Case("dgc", {"sparsity": 0.9, "indices": indices, "values": values})
            found[str(case)] = Target(case)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "fuzz.json")
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    chosen = targets()
    tally: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in chosen}
    examples: list[dict[str, Any]] = []
    began = time.perf_counter()
    for name, target in chosen.items():
        for message in target.messages:
            assert target.read(message) == "decoded", f"{name} refuses a sound message"
    names = list(chosen)
    for trial in range(args.messages):
        name = names[trial % len(names)]
        target = chosen[name]
        damaged = mutate(target.messages[trial // len(names) % len(target.messages)], rng)
        try:
            tally[name][target.read(damaged)] += 1
        except Exception as error:
            tally[name]["failed"] += 1
            if len(examples) < 20:
                examples.append({"case": name, "error": repr(error), "message": bytes(damaged).hex()})
    total = sum(tally.values(), collections.Counter())
    results = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "messages": args.messages,
        "seed": args.seed,
        "seconds": time.perf_counter() - began,
        "total": dict(total),
        "by_case": {name: dict(counts) for name, counts in tally.items()},
        "failures": examples,
    }
    args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{args.messages:,} messages: {dict(total)} in {results['seconds']:.0f} s")
    for example in examples[:5]:
        print(example["case"], example["error"])
    sys.exit(bool(total["failed"]))


if __name__ == "__main__":
    main()
