"""Compressors by name: one row each."""

from __future__ import annotations

from dgc.core.compressors.base import Algorithm
from dgc.core.compressors.quantizers.dorefa import Dorefa
from dgc.core.compressors.quantizers.onebit import Onebit
from dgc.core.compressors.quantizers.qsgd import Qsgd
from dgc.core.compressors.quantizers.terngrad import Terngrad
from dgc.core.compressors.sparsifiers.adacomp import Adacomp
from dgc.core.compressors.sparsifiers.dryden import Dryden
from dgc.core.compressors.sparsifiers.strom import Strom
from dgc.core.compressors.sparsifiers.topk import DGC, Topk
from dgc.errors import ConfigError

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
    if not algorithm.name.isidentifier() or algorithm.name in ("none", "fp16"):
        raise ConfigError(f"a compressor cannot be named {algorithm.name!r}; give it a Python name of its own")
    if algorithm.number not in numbers:
        raise ConfigError(
            f"compressor {algorithm.name!r} has number {algorithm.number}; allowed: {numbers[0]} to {numbers[-1]}"
        )
    for other in _BY_NAME.values():
        if other.name == algorithm.name or other.number == algorithm.number:
            raise ConfigError(
                f"compressor {algorithm.name!r} with number {algorithm.number} collides with {other.name!r}, which has "
                f"number {other.number}; names and numbers must be unique"
            )
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
