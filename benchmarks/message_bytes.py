"""Bytes that a rank sends in a step of ``dgc``, by codec: ``python benchmarks/message_bytes.py [--model resnet50]``.

They follow from the plan of each bucket: headers, entries, small tensors, padding, and what goes by allreduce. Nothing
is run, so the figures are the same on every machine.
"""

from __future__ import annotations

import argparse

from compress import MODELS

from dgc.core.compressors import make_config
from dgc.core.exchange.choice import entry_plan
from dgc.core.layout import Parameter, make_layout

BEFORE = {"indices": "uint16", "values": "float16"}
CHOICES: tuple[dict[str, str], ...] = (
    {},
    {"small": "int2"},
    {"small": "int8"},
    {"small": "float16"},
    {"small": "float32"},
    {"include": "*"},
    {"values": "int8"},
    {"values": "float16"},
    {"indices": "uint16"},
    {**BEFORE, "small": "int8"},
    {**BEFORE, "small": "float32"},
)


def sent(shapes: list[tuple[int, ...]], density: float, ranks: int, options: dict[str, str]) -> tuple[int, int]:
    """Bytes a step and rank with these options, and those of a dense exchange."""
    config = make_config(dict(options))
    layout = make_layout([Parameter(str(i), shape, "float32") for i, shape in enumerate(shapes)], config)
    total = 0
    for bucket in layout.buckets:
        plan = entry_plan(bucket, config, density, ranks, has_alltoall=False)
        total += plan.form.nbytes + plan.vector.plain_bytes - plan.vector.inline_bytes
    return total, 4 * layout.numel


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 16])
    arguments = parser.parse_args()
    shapes = MODELS[arguments.model]()
    print(f"{arguments.model}, density {arguments.density:.2%}: bytes a step and rank, and times fewer than dense")
    for options in CHOICES:
        row = [sent(shapes, arguments.density, ranks, options) for ranks in arguments.ranks]
        figures = "  ".join(
            f"{ranks:3} ranks {total:10,} {dense / total:6.0f}x"
            for ranks, (total, dense) in zip(arguments.ranks, row, strict=True)
        )
        print(f"{', '.join(f'{k}={v}' for k, v in options.items()) or 'defaults':54} {figures}")


if __name__ == "__main__":
    main()
