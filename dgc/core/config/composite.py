"""Compressors made of compressors: which one works on a tensor follows from its size or name, or from the step.

Source: the wrappers of hivemind's ``compression`` package.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dgc.core.config.config import DGCConfig

WRAPPERS = ("by_size", "by_name", "by_step")


@dataclass(frozen=True)
class Parts:
    """The members of a wrapper. ``configs[i]`` holds for what ``keys[i]`` says; None is sent dense.

    Keys of ``by_size`` are the smallest number of elements, those of ``by_step`` the first step, both ascending from 0;
    those of ``by_name`` are name patterns, of which the first that fits counts.
    """

    keys: tuple[Any, ...]
    configs: tuple[DGCConfig | None, ...]

    def place(self, kind: str, name: str, numel: int) -> int | None:
        """Which member a tensor belongs to; None where no pattern fits. With ``by_step``, 0."""
        if kind == "by_name":
            return next((i for i, pattern in enumerate(self.keys) if fnmatchcase(name, pattern)), None)
        return max(i for i, least in enumerate(self.keys) if numel >= least) if kind == "by_size" else 0
