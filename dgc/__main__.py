"""``python -m dgc``: what there is, and a Horovod to use it with."""

from __future__ import annotations

import argparse
import sys

from dgc.build_horovod import command as build_horovod


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dgc", description="Gradient compression for Horovod")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    summary = "list all compressors: bits, error feedback, unbiased, source"
    compressors = commands.add_parser("compressors", help=summary, description=f"{summary.capitalize()}.")
    compressors.set_defaults(run=list_compressors)
    build_horovod.add_arguments(commands.add_parser("build-horovod", help=build_horovod.SUMMARY))
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


def list_compressors(arguments: argparse.Namespace) -> int:
    """Write the table of all compressors."""
    # Imported here: the other commands need neither NumPy nor Numba.
    from dgc.core.compressors.facts import table

    sys.stdout.write(table() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
