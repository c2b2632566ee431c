"""``dgc``, or ``python -m dgc``: list compressors, build Horovod, compile kernels, look for problems, measure."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from dgc import __version__
from dgc.contrib import build_horovod, doctor

if TYPE_CHECKING:
    from dgc.adapter.job import Horovod
    from dgc.core.collectives import Transport

_TITLES = ("name", "bits per element", "error feedback", "unbiased", "source")


def main(arguments: list[str] | None = None) -> int:
    """Run the command that ``arguments`` name; return the exit status."""
    name = os.path.basename(sys.argv[0])
    parser = argparse.ArgumentParser(
        prog="dgc" if name == "dgc" else "python -m dgc", description="Gradient compression"
    )
    parser.add_argument("--version", action="version", version=f"dgc {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    summary = "list all compressors: bits, error feedback, unbiased, source"
    compressors = commands.add_parser("compressors", help=summary, description=f"{summary.capitalize()}.")
    compressors.set_defaults(run=list_compressors)
    build_horovod.add_build_options(commands.add_parser("build-horovod", help=build_horovod.SUMMARY))
    doctor.add_doctor_options(
        commands.add_parser("doctor", help=doctor.SUMMARY, description=f"{doctor.SUMMARY.capitalize()}.")
    )
    summary = "compile all kernels into the cache, for the image of a container or before a first start"
    commands.add_parser("compile", help=summary, description=f"{summary.capitalize()}.").set_defaults(run=compile_now)
    bench = commands.add_parser("bench", help="say what a step's exchange costs in this job, and which option to set")
    bench.add_argument("--parameters", type=int, default=25_000_000, help="size of the model (default: %(default)s)")
    bench.add_argument("--model", metavar="MODULE:FUNCTION", help="makes the model; replaces --parameters")
    bench.add_argument("--optimizer", choices=("adam", "adamw", "sgd"), default="adamw", help="default: %(default)s")
    bench.add_argument(
        "--steps", type=int, default=10_000, help="length of the training; chooses the sparsity (default: %(default)s)"
    )
    bench.add_argument(
        "--classic", action="store_true", help="measure classic error feedback with AdamW, as with a tape"
    )
    bench.add_argument("--sparsity", type=float, help="share of entries held back; replaces --steps")
    bench.add_argument("--bandwidth", metavar="1gbit", help="of a network to predict times for, with --latency")
    bench.add_argument("--latency", metavar="200us", help="from one host to the next")
    bench.set_defaults(run=measure_job)
    parsed = parser.parse_args(arguments)
    if not hasattr(parsed, "run"):
        parser.print_help(sys.stderr)
        return 2
    return parsed.run(parsed)


def measure_job(arguments: argparse.Namespace) -> int:
    """Measure a step's exchange in this job."""
    from dgc.contrib import bench

    return bench.run_bench(arguments, _connect)


def compile_now(arguments: argparse.Namespace) -> int:
    """Compile all kernels, and print the folder that holds them."""
    from dgc.adapter.warm_up import compile_all

    sys.stdout.write(f"the kernels for this processor are in {compile_all()}\n")
    return 0


# Variables that the launchers of a Horovod job set.
_LAUNCHED = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_PROCID")


def _connect() -> Transport:
    """Return the transport that a training script would use if it were started in this way."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        import torch.distributed as dist

        from dgc.torch.distributed import DistributedTransport

        dist.init_process_group("gloo")
        return DistributedTransport()
    if not any(name in os.environ for name in _LAUNCHED):
        from dgc.contrib.bench import LAUNCH
        from dgc.errors import ConfigError

        raise ConfigError(f"no launcher has started this process; {LAUNCH}")
    framework = "torch" if importlib.util.find_spec("torch") else "tensorflow"
    job: Horovod = importlib.import_module(f"dgc.{framework}.horovod").HOROVOD
    job.module(initialized=False).init()
    return job.make_transport()


def list_compressors(arguments: argparse.Namespace) -> int:
    """Write the table of all compressors."""
    sys.stdout.write(table() + "\n")
    return 0


def facts() -> list[tuple[str, str, str, str, str]]:
    """Return a row for each compressor: name, bits per element, error feedback, unbiased, source."""
    # Import these here, because build-horovod and doctor must work without NumPy and Numba.
    from dgc.core.compressors import compressor_class, compressor_names

    rows = [compressor_class(name) for name in compressor_names()]
    return [(r.name, r.bits, _yes(r.error_feedback), _yes(r.unbiased), r.source) for r in rows]


def table() -> str:
    """Return the rows of :func:`facts` as a text table with titles."""
    rows = [_TITLES, *facts()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_TITLES))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


if __name__ == "__main__":
    sys.exit(main())
