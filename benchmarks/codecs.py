"""Time and size of the wire codecs: ``python benchmarks/codecs.py [--json]``.

n = elements of the space that positions come from, k = entries. Each codec writes and reads one message of k random
entries. A plain copy of the same number of bytes is timed, too: no codec can be faster.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from dgc.core import codecs
from dgc.core.message import HEADER_BYTES

ELEMENTS = 25_500_000  # ResNet-50
SEGMENTS = 54
DENSITIES = (0.001, 0.01)
DENSE_BYTES = 4
SHOWN = [
    ("uint16", "float32"),
    ("uint16", "float16"),
    ("elias_fano", "float16"),
    ("elias_fano", "int8"),
    ("elias_fano", "int2"),
]


def microseconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call, after two that do not count."""
    call()
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


@dataclass(frozen=True)
class Row:
    """One codec at one density."""

    kind: str
    codec: str
    n: int
    k: int
    bytes: int
    bits_per_entry: float
    encode_us: float
    decode_us: float
    copy_us: float


@dataclass(frozen=True)
class Pair:
    """A whole message, header included, against dense float32."""

    indices: str
    values: str
    k: int
    ratio: float


def measure(kind: str, name: str, n: int, k: int, repeats: int) -> Row:
    """Return sizes, and times of encode, decode and a copy of the same bytes."""
    rng = np.random.default_rng(0)
    positions = np.sort(rng.choice(n, k, replace=False))
    bounds = np.searchsorted(positions, np.linspace(0, n, SEGMENTS + 1).astype(np.int64))
    encode: Callable[[], int]
    decode: Callable[[], object]
    if kind == "index":
        index = codecs.INDEX_CODECS[name]
        block = np.empty(index.max_bytes(n, k), np.uint8)
        encode, decode = lambda: index.encode(positions, n, block), lambda: index.decode(block, n, k)
    else:
        value = codecs.VALUE_CODECS[name]
        values = (1e-4 * rng.standard_normal(k)).astype(np.float32)
        block = np.empty(value.max_bytes(k, SEGMENTS), np.uint8)
        encode, decode = lambda: value.encode(values, bounds, block), lambda: value.decode(block, k, bounds)
    used = encode()
    message = block[:used]
    target = np.empty_like(message)
    return Row(
        kind=kind,
        codec=name,
        n=n,
        k=k,
        bytes=used,
        bits_per_entry=8 * used / k,
        encode_us=microseconds(encode, repeats),
        decode_us=microseconds(decode, repeats),
        copy_us=microseconds(lambda: np.copyto(target, message), repeats),
    )


def pairs(rows: list[Row]) -> list[Pair]:
    """Return how much smaller the messages of all pairs of codecs are than the dense gradient."""
    result = []
    for index in (row for row in rows if row.kind == "index"):
        for value in (row for row in rows if row.kind == "value" and row.k == index.k):
            total = index.bytes + value.bytes + HEADER_BYTES
            result.append(Pair(index.codec, value.codec, index.k, index.n * DENSE_BYTES / total))
    return result


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="n")
    parser.add_argument("--repeats", type=int, default=30, help="timed calls per figure")
    options = parser.parse_args()
    n = options.elements
    chosen = [("index", name) for name in codecs.INDEX_CODECS]
    chosen += [("value", name) for name in codecs.VALUE_CODECS]
    rows = [measure(kind, name, n, int(n * density), options.repeats) for density in DENSITIES for kind, name in chosen]
    ratios = pairs(rows)
    if options.json:
        machine = {"machine": platform.machine(), "python": platform.python_version(), "numpy": np.__version__}
        figures = {"codecs": [asdict(row) for row in rows], "messages": [asdict(each) for each in ratios]}
        print(json.dumps({"environment": machine, **figures}, indent=1))
        return
    for density in DENSITIES:
        k = int(n * density)
        print(f"n = {n:,}, k = {k:,} ({density:.1%})")
        print(f"{'codec':<12} {'encode us':>10} {'decode us':>10} {'copy us':>8} {'bits/entry':>11} {'bytes':>10}")
        for row in rows:
            if row.k == k:
                print(
                    f"{row.codec:<12} {row.encode_us:10.0f} {row.decode_us:10.0f} {row.copy_us:8.1f} "
                    f"{row.bits_per_entry:11.3f} {row.bytes:10,}"
                )
        print("dense float32 / message: ", end="")
        shown = [each for each in ratios if each.k == k and (each.indices, each.values) in SHOWN]
        print(", ".join(f"{each.indices} + {each.values} {each.ratio:.0f}" for each in shown), end="\n\n")


if __name__ == "__main__":
    main()
