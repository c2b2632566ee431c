"""Which trainings there are, in an order in which an interrupted plan is of use already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evidence.application import Scale
from evidence.applications import CLASSES
from evidence.variants import ABLATIONS, FAMILY

DEFAULT_SEEDS: dict[Scale, tuple[int, ...]] = {"full": (0, 1, 2), "quick": (0,), "tiny": (0,)}
SMALL_RANKS = 2
"""Ranks of everything that is not the full plan."""


@dataclass(frozen=True)
class Run:
    """One training."""

    application: str
    variant: str
    seed: int

    @property
    def id(self) -> str:
        """In file names."""
        return f"{self.application}-{self.variant}-{self.seed}"


VARIANTS_OF: dict[str, tuple[str, ...]] = {
    **{name: ("dense", "dgc", "halves") for name in CLASSES},
    "language": ("dense", "dgc", "halves", *ABLATIONS, *FAMILY),
    "image": ("dense", "dgc", "halves", "authors"),
    "transformer": ("dense", "dgc", "halves", "no-correction"),
    "transformer_short": ("dense", "dgc", "halves", "steps"),
    "speech_short": ("dense", "dgc", "halves", "steps"),
}
"""What is trained of each application."""


def plan(
    seeds: Sequence[int],
    applications: Sequence[str] = tuple(CLASSES),
    variants: Sequence[str] | None = None,
) -> list[Run]:
    """All trainings: everything with the first seed before anything with the second; dense and DGC before the others.

    Args:
        seeds: in this order.
        applications: names, in any order.
        variants: names, in any order; None: all that an application has.
    """
    chosen = [name for name in CLASSES if name in applications]
    runs = []
    for seed in seeds:
        runs += [Run(name, variant, seed) for name in chosen for variant in ("dense", "dgc")]
        runs += [Run(name, variant, seed) for name in chosen for variant in VARIANTS_OF[name][2:]]
    return [run for run in runs if variants is None or run.variant in variants]
