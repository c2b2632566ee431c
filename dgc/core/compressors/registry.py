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
from dgc.core.config.checks import require_unused
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
