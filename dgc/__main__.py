"""``python -m dgc compressors``: what there is."""

from __future__ import annotations

import argparse
import sys

from dgc.core.compressors.facts import table


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
