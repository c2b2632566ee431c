"""Find compressors by name, and make a checked config from a user's keyword options."""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from typing import Any

from dgc.core.checks import plain, require_choice, require_unused
from dgc.core.codecs import FREE_NUMBERS, INDEX_CODECS, VALUE_CODECS
from dgc.core.compressors.base import (
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
from dgc.core.config import DGCConfig, of_steps
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
    "register",
]

OWN_NUMBERS = range(1, 128)

_BY_NAME: dict[str, type[Algorithm]] = {}


def register(algorithm: type[Algorithm], *, numbers: range = FREE_NUMBERS) -> type[Algorithm]:
    """Add a compressor as ``Compression.<name>``. It can be used as a decorator. Call it on every rank.

    Raises:
        ConfigError: the name or the number is used already, or the number is not one of ``numbers``.
    """
    taken = {other.name: other.number for other in _BY_NAME.values()}
    name, number = algorithm.name, algorithm.number
    require_unused("compressor", name, number, numbers=numbers, reserved=("none", "fp16", "from_dict"), taken=taken)
    _BY_NAME[algorithm.name] = algorithm
    return algorithm


for _own in (DGC, Topk, Strom, Dryden, Adacomp, Onebit, Qsgd, Terngrad, Dorefa):
    register(_own, numbers=OWN_NUMBERS)


def compressor_names() -> tuple[str, ...]:
    """Return the names of all compressors."""
    return tuple(_BY_NAME)


def compressor_class(name: str) -> type[Algorithm]:
    """Return the compressor of this name.

    Raises:
        ConfigError: there is no such compressor; the message lists all names.
    """
    if not isinstance(name, str) or name not in _BY_NAME:
        raise ConfigError(f"there is no compressor {name!r}; choose one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def make_config(options: dict[str, Any], *, algorithm: str = "dgc", owner: str | None = None) -> DGCConfig:
    """Make a compressor's config from its keyword options. Errors name the ``owner``.

    Raises:
        TypeError: the compressor has no such option; the message lists the valid ones.
        ConfigError: a value is out of range, or there is no such compressor.

    Warns:
        RuntimeWarning: there are several sparsities, but no ``rampup_step``.
    """
    row = compressor_class(algorithm)
    own = [f.name for f in dataclasses.fields(row.Options)]
    valid = [*own, *row.common_options()]
    unknown = [name for name in options if name not in valid]
    if unknown:
        close = [f"did you mean {name}? " for name in difflib.get_close_matches(unknown[0], valid, 1)]
        if unknown[0] == "steps":
            close = ["only Compression.dgc chooses the sparsity from it; "]
        raise TypeError(
            f"Compression.{owner or algorithm} got an unknown option {unknown[0]!r}; {''.join(close)}valid options: "
            f"{', '.join(valid)}"
        )
    options = of_steps(**options)
    common = {**row.defaults(), **{name: value for name, value in options.items() if name not in own}}
    chosen = row.Options(**{name: plain(value) for name, value in options.items() if name in own}) if own else None
    config = DGCConfig(**common, algorithm=algorithm, own=chosen)
    require_choice("indices", config.indices, tuple(INDEX_CODECS))
    require_choice("values", config.values, (None, *VALUE_CODECS))
    require_choice("small", config.small, tuple(VALUE_CODECS))
    if len(set(config.sparsities)) > 1 and "rampup_step" not in options:
        warnings.warn(
            f"without rampup_step=, the sparsity is {config.sparsities[-1]}, the last of the list, from step "
            f"{config.rampup_begin_step + 1} on: give rampup_step=, the number of steps over which the list is spread",
            RuntimeWarning,
            stacklevel=5,
        )
    return config


def leaves_zeros(config: DGCConfig) -> bool:
    """Return whether most entries of a compressor's results may be exactly 0."""
    row = compressor_class(config.algorithm)
    return row.sends_entries and (not row.scheduled or any(config.sparsities))
