"""Compressors made of compressors: which one works on a tensor follows from its size or name, or from the step.

Source: the wrappers of hivemind's ``compression`` package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dgc.core.compressors.base import COMMON, FEEDBACK
from dgc.core.config import DGCConfig
from dgc.core.errors import ConfigError

WRAPPERS = ("by_size", "by_name", "by_step")

_OF_THE_WRAPPER = {*COMMON, "momentum", "nesterov", "weight_decay", "transport", "loss_scale", "process_set"}
"""Options that concern all tensors alike: the wrapper has them, its members must not."""


@dataclass(frozen=True)
class Parts:
    """The members of a wrapper. ``configs[i]`` holds for what ``keys[i]`` says; None travels dense.

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


def make_wrapper_config(kind: str, members: Mapping[Any, Any], options: dict[str, Any]) -> DGCConfig:
    """The config of a wrapper.

    Args:
        kind: one of ``WRAPPERS``.
        members: key -> a compressor that is bound to nothing yet, or None for no compression.
        options: of the wrapper.

    Raises:
        TypeError: an unknown option; the message lists the valid ones.
        ConfigError: keys or members that cannot be.
    """
    valid = [*COMMON, *(name for name in FEEDBACK if name != "error_feedback")]
    unknown = [name for name in options if name not in valid]
    if unknown:
        raise TypeError(
            f"Compression.{kind} got an unknown option {unknown[0]!r}; valid options: {', '.join(valid)}; options of "
            "one compressor belong to that member"
        )
    if not isinstance(members, Mapping) or not members:
        raise ConfigError(f"Compression.{kind} got {members!r}; {_EXAMPLES[kind]}")
    keys = tuple(members) if kind == "by_name" else tuple(sorted(members, key=lambda key: (str(type(key)), key)))
    for key in keys:
        good = isinstance(key, str) if kind == "by_name" else type(key) is int and key >= 0
        if not good:
            raise ConfigError(f"Compression.{kind} got the key {key!r}; {_EXAMPLES[kind]}")
    if kind != "by_name" and keys[0] != 0:
        raise ConfigError(f"Compression.{kind} begins with {keys[0]}; give a member for 0, None for no compression")
    configs = tuple(_member_config(kind, key, members[key]) for key in keys)
    begin = options.get("rampup_begin_step", 0)
    if kind == "by_step" and configs[0] is None:
        if begin or len(keys) == 1:
            raise ConfigError("by_step with None at 0 is a dense warm-up; give the step at which a compressor follows")
        begin, keys, configs = keys[1], (0, *keys[2:]), configs[1:]
    if kind == "by_step" and None in configs:
        raise ConfigError(
            "by_step cannot go back to no compression: what has not been sent by then never would be; give None at 0 "
            "only"
        )
    chosen = {"momentum": 0.0, "sparsity": 0.0, **options, "rampup_begin_step": begin}
    config = DGCConfig(**chosen, algorithm=kind)
    shared = {name: getattr(config, name) for name in (*COMMON, "momentum", "nesterov", "weight_decay")}
    members_own = tuple(None if c is None else dataclasses.replace(c, **shared) for c in configs)
    return dataclasses.replace(config, own=Parts(keys, members_own))


_EXAMPLES = {
    "by_size": "give {0: None, 100_000: Compression.topk()}: the compressor of tensors from so many elements on",
    "by_name": "give {'*embedding*': Compression.topk(), '*': Compression.qsgd()}: the first pattern that fits counts",
    "by_step": "give {0: None, 500: Compression.topk()}: the compressor from a step on",
}


def _member_config(kind: str, key: Any, member: Any) -> DGCConfig | None:
    if member is None:
        return None
    config, given = getattr(member, "config", None), getattr(member, "given_options", {})
    if not isinstance(config, DGCConfig) or config.algorithm in WRAPPERS or getattr(member, "is_bound", False):
        raise ConfigError(
            f"the member {key!r} of Compression.{kind} is {member!r}; give a compressor such as Compression.topk() "
            "without parameters, or None"
        )
    misplaced = [name for name in given if name in _OF_THE_WRAPPER]
    if misplaced:
        raise ConfigError(
            f"{misplaced[0]!r} concerns all tensors alike; give it to Compression.{kind} instead of its member {key!r}"
        )
    return config
