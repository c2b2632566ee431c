"""Write ``tests/golden/compressors``, a message of each compressor: ``python tests/golden/regenerate_compressors.py``.

Run it only when the format changes on purpose, together with a new version of the format.
"""

import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "compressors"
sys.path[:0] = [str(FOLDER.parents[2]), str(FOLDER.parents[1]), str(FOLDER.parents[1] / "core" / "tools")]

from contract_tools import Alone, Case  # noqa: E402

CASES = [
    Case("topk", {"sparsity": 0.9}),
    Case("strom", {"threshold": 0.5, "max_density": 0.5}),
    Case("dryden", {"sparsity": 0.9}),
    Case("adacomp", {"conv_bin": 10, "fc_bin": 64}),
    Case("onebit"),
    Case("onebit", {"means": "row"}),
    Case("qsgd", {"bucket_size": 64}),
    Case("terngrad"),
    Case("dorefa", {"bits": 3}),
]
SHAPES = {"conv": (3, 2, 3, 3), "fc": (7, 11)}


def message(case: Case) -> bytes:
    """The payload for values that are multiples of 1/16, so that sums of them are exact."""
    alone = Alone(case, SHAPES, seed=7)
    x = alone.flat({t.name: ((np.arange(t.n) * 37 + 11) % 101 - 50) / 16 for t in alone.tensors})
    increment = alone.flat({t.name: ((np.arange(t.n) * 53 + 5) % 89 - 44) / 16 for t in alone.tensors})
    data, _, used = alone.encode(x, step=3, rank=1, increment=increment)
    return data[:used].tobytes()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for case in CASES:
        text = message(case).hex()
        lines = [text[i : i + 64] for i in range(0, len(text), 64)]
        (FOLDER / f"{case}.hex").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
