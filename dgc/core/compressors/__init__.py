"""The compressors by name, and from a user's keyword options to a validated config."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from dgc.core.codecs import index_codec_names, value_codec, value_codec_names
from dgc.core.compressors.base import (
    COMMON,
    FEEDBACK,
    Algorithm,
    BucketSpec,
    DenseValues,
    PerTensor,
    SparseValues,
    StepInfo,
    Tensor,
)
from dgc.core.compressors.quantizers import Dorefa, Onebit, Qsgd, Terngrad
from dgc.core.compressors.sparsifiers import DGC, Adacomp, Dryden, Strom, Topk
from dgc.core.config import WRAPPERS, DGCConfig, Parts, of_steps, plain, require_choice, require_unused
from dgc.errors import ConfigError

__all__ = [
    "Algorithm",
    "BucketSpec",
    "DenseValues",
    "PerTensor",
    "SparseValues",
    "StepInfo",
    "Tensor",
    "compressor_class",
    "compressor_names",
    "leaves_zeros",
    "make_config",
    "make_wrapper_config",
    "register",
]

OWN_NUMBERS = range(1, 128)
FREE_NUMBERS = range(128, 256)

_ROWS: tuple[type[Algorithm], ...] = (
    DGC,
    Topk,
    Strom,
    Dryden,
    Adacomp,
    Onebit,
    Qsgd,
    Terngrad,
    Dorefa,
)

_BY_NAME: dict[str, type[Algorithm]] = {}


def register(algorithm: type[Algorithm], *, numbers: range = FREE_NUMBERS) -> type[Algorithm]:
    """Add a compressor, so that ``Compression.<name>`` has it in every framework; usable as a decorator.

    Every rank must register the same ones.

    Raises:
        ConfigError: name or number are taken, or the number is outside of ``numbers``.
    """
    taken = {other.name: other.number for other in _BY_NAME.values()}
    name, number = algorithm.name, algorithm.number
    require_unused("compressor", name, number, numbers=numbers, reserved=("none", "fp16"), taken=taken)
    _BY_NAME[algorithm.name] = algorithm
    return algorithm


for _row in _ROWS:
    register(_row, numbers=OWN_NUMBERS)


def compressor_names() -> tuple[str, ...]:
    """Names of all compressors."""
    return tuple(_BY_NAME)


def compressor_class(name: str) -> type[Algorithm]:
    """Return the compressor of this name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    if name not in _BY_NAME:
        raise ConfigError(f"there is no compressor {name!r}; choose one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


_OF_THE_WRAPPER = {*COMMON, "momentum", "nesterov", "weight_decay", "transport", "loss_scale", "process_set"}
"""Options that concern all tensors alike: the wrapper has them, its members must not."""


def make_config(options: dict[str, Any], *, algorithm: str = "dgc", owner: str | None = None) -> DGCConfig:
    """Build the config of a compressor from its keyword options, shared ones and its own; errors name the ``owner``.

    Raises:
        TypeError: an option is unknown, or one of another compressor; the message lists the valid ones.
        ConfigError: a value is out of range, or there is no such compressor.

    Warns:
        RuntimeWarning: there are several sparsities, and no number of steps for them.
    """
    row = compressor_class(algorithm)
    own = [f.name for f in dataclasses.fields(row.Options)]
    valid = [*own, *row.common_options()]
    unknown = [name for name in options if name not in valid]
    if unknown:
        raise TypeError(
            f"Compression.{owner or algorithm} got an unknown option {unknown[0]!r}; valid options: {', '.join(valid)}"
        )
    options = of_steps(**options)
    common = {**row.defaults(), **{name: value for name, value in options.items() if name not in own}}
    chosen = row.Options(**{name: plain(value) for name, value in options.items() if name in own}) if own else None
    config = DGCConfig(**common, algorithm=algorithm, own=chosen)
    check_codecs(config.indices, config.values, config.small)
    if len(set(config.sparsity)) > 1 and "rampup_step" not in options:
        warnings.warn(
            f"the last of the sparsities, {config.sparsity[-1]}, holds from step {config.rampup_begin_step + 1} on: "
            "give rampup_step=, the number of steps for the whole list",
            RuntimeWarning,
            stacklevel=5,
        )
    return config


def leaves_zeros(config: DGCConfig) -> bool:
    """Whether most of what a compressor, or a member of a wrapper, makes of a gradient may be exactly 0."""
    if isinstance(config.own, Parts):
        return any(part is not None and leaves_zeros(part) for part in config.own.configs)
    row = compressor_class(config.algorithm)
    return row.sends_entries and (not row.scheduled or any(config.sparsity))


def check_codecs(indices: object, values: object, small: object) -> None:
    """Refuse names that no codec has; ``indices`` may be "auto".

    Raises:
        ConfigError: the message lists the valid ones.
    """
    require_choice("indices", indices, (*index_codec_names(), "auto"))
    require_choice("values", values, value_codec_names())
    require_choice("small", small, tuple(n for n in value_codec_names() if value_codec(n).dtype == np.float32))


def make_wrapper_config(kind: str, members: Mapping[Any, Any], options: dict[str, Any]) -> DGCConfig:
    """The config of a wrapper, by key -> a compressor that is bound to nothing yet, or None for no compression.

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
    chosen = {"momentum": 0.0, "sparsity": 0.0, "small": "float32", **options, "rampup_begin_step": begin}
    config = DGCConfig(**chosen, algorithm=kind)
    check_codecs(config.indices, config.values, config.small)
    shared = {name: getattr(config, name) for name in (*COMMON, "momentum", "nesterov", "weight_decay")}
    members_own = tuple(None if c is None else dataclasses.replace(c, **shared) for c in configs)
    return dataclasses.replace(config, own=Parts(keys, members_own))


_EXAMPLES = {
    "by_size": "give {0: None, 100_000: Compression.topk()}: the compressor of tensors from so many elements on",
    "by_name": "give {'*embedding*': Compression.topk(), '*': Compression.qsgd()}: the first pattern that fits counts",
    "by_step": "give {0: None, 500: Compression.topk()}: the compressor from a step on",
}


def _member_config(kind: str, key: object, member: object) -> DGCConfig | None:
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
