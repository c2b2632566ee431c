"""``python -m evidence``: train everything that has no result yet, then write the page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from evidence.application import EvidenceError, Scale
from evidence.applications import CLASSES
from evidence.estimate import Estimate
from evidence.launch import REPOSITORY, Launcher, available, duration
from evidence.plan import DEFAULT_SEEDS, plan
from evidence.report.page import write_page
from evidence.variants import VARIANTS

RESULTS = REPOSITORY / "benchmarks" / "results" / "evidence"
PAGE = REPOSITORY / "benchmarks" / "evidence.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit status."""
    args = parse_arguments(arguments)
    scale: Scale = "quick" if args.quick else "full"
    results = args.results or (RESULTS if scale == "full" else results_of(scale))
    page = args.page or (PAGE if scale == "full" else results / "evidence.md")
    try:
        if args.report:
            write_page(results, page, {})
            print(f"written: {page}")
            return 0
        return carry_out(args, scale, results, page)
    except EvidenceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: what was done so far is kept, and the same command goes on from there", file=sys.stderr)
        return 130


def carry_out(args: argparse.Namespace, scale: Scale, results: Path, page: Path) -> int:
    """Train what is to be trained, and write the page; returns the exit status.

    Raises:
        EvidenceError: nothing can be trained, or files cannot be written.
    """
    missing = available(args.only, scale)
    for name, sentence in missing.items():
        print(f"{name} is left out: {sentence}", flush=True)
    names = [name for name in args.only if name not in missing]
    runs = plan(args.seeds or DEFAULT_SEEDS[scale], names, args.variants)
    if not runs:
        raise EvidenceError("there is nothing to train")
    launcher = Launcher(results, scale, args.ranks)
    todo = [run for run in runs if launcher.result(run) is None]
    seconds = Estimate(scale, {}).left(None, 0, {}, todo)
    print(f"{len(runs)} trainings, {len(todo)} to do, about {duration(seconds)}; results: {results}", flush=True)
    failed = launcher.run_all(runs)
    write_page(results, page, missing)
    print(f"written: {page}")
    for run, words in failed.items():
        print(f"{run.id} failed: {words}", file=sys.stderr)
    return 1 if failed else 0


def results_of(scale: Scale) -> Path:
    """Where results lie that are no part of the repository."""
    from evidence.data.cache import cache_folder

    return cache_folder() / "results" / scale


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m evidence", description="Train the paper's kinds of application, dense beside compressed"
    )
    parser.add_argument("--quick", action="store_true", help="everything once, small: about five minutes")
    some = _some_of("application", CLASSES)
    parser.add_argument("--only", type=some, default=list(CLASSES), help=f"some of {','.join(CLASSES)}")
    parser.add_argument("--variants", type=_some_of("variant", VARIANTS), help=f"some of {','.join(VARIANTS)}")
    parser.add_argument("--seeds", type=_numbers, help="as 0,1,2 (quick: 0)")
    parser.add_argument("--ranks", type=int, help="of every training (4; quick: 2)")
    parser.add_argument("--results", type=Path, help=f"folder of the results ({RESULTS.relative_to(REPOSITORY)})")
    parser.add_argument("--page", type=Path, help=f"the page to write ({PAGE.relative_to(REPOSITORY)})")
    parser.add_argument("--report", action="store_true", help="train nothing, write the page of what is there")
    args = parser.parse_args(arguments)
    if args.ranks is not None and args.ranks < 2:
        parser.error("--ranks must be at least 2: one process has nobody to send gradients to")
    return args


def _some_of(what: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """An option's names, of which there are no others than those known."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"there is no {what} {name!r}; there are {', '.join(known)}")
        return found

    return names


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise argparse.ArgumentTypeError("seeds are different numbers >= 0, as in 0,1,2")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
