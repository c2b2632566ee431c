"""``python -m dgc compressors``: what there is."""

from __future__ import annotations

import argparse
import sys

from dgc.core.compressors.registry import compressor_class, compressor_names
from dgc.core.config.composite import WRAPPERS

_TITLES = ("name", "bits per element", "error feedback", "unbiased", "source")


def facts() -> list[tuple[str, str, str, str, str]]:
    """One row for each compressor: name, bits per element, error feedback, unbiased, source."""
    rows = [compressor_class(name) for name in compressor_names()]
    return [(r.name, r.bits, _yes(r.error_feedback), _yes(r.unbiased), r.source) for r in rows]


def table() -> str:
    """The facts in aligned columns under their titles."""
    rows = [_TITLES, *facts()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_TITLES))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    wrappers = f"{', '.join(WRAPPERS)}: choose among them by tensor or step"
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:], "", wrappers])


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dgc", description="Gradient compression for Horovod")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("compressors", help="list all compressors: bits, error feedback, unbiased, source")
    parser.parse_args(arguments)
    sys.stdout.write(table() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
