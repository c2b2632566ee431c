"""Codecs by name, as a user's options say it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from dgc.core.config.checks import require_unused
from dgc.core.wire.codecs.base import IndexCodec, ValueCodec
from dgc.core.wire.codecs.float_values import Bfloat16Values, Float16Values, Float32Values, Float64Values
from dgc.core.wire.codecs.indices import EliasFanoIndices, Int32Indices, Uint16Indices
from dgc.core.wire.codecs.quantized_values import Int2Values, Int3Values, Int8Values, SignValues
from dgc.errors import ConfigError

FREE_NUMBERS = range(128, 256)
"""Numbers in a message's header that this package never gives to a codec of its own."""


# Cheapest to decode first: smallest_index_codec() breaks ties by this order.
_OWN_INDEX_CODECS: tuple[IndexCodec, ...] = (Int32Indices(), Uint16Indices(), EliasFanoIndices())
_OWN_VALUE_CODECS: tuple[ValueCodec, ...] = (
    Float16Values(),
    Float32Values(),
    Bfloat16Values(),
    Int8Values(),
    Int3Values(),
    Int2Values(),
    SignValues(),
    Float64Values(),
)
_INDEX_CODECS = {codec.name: codec for codec in _OWN_INDEX_CODECS}
_VALUE_CODECS = {codec.name: codec for codec in _OWN_VALUE_CODECS}
_KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "indices": (IndexCodec, _INDEX_CODECS),
    "values": (ValueCodec, _VALUE_CODECS),
}


def register_codec(option: str, codec: IndexCodec | ValueCodec) -> None:
    """Add a codec, so that the option ``indices=`` or ``values=`` takes its name in every framework.

    Every rank must register the same ones. ``indices="auto"`` goes on choosing among this package's own.

    Args:
        option: "indices" for an :class:`IndexCodec`, "values" for a :class:`ValueCodec`.
        codec: every message is written and read by it, from several threads.

    Raises:
        ConfigError: another option, a member of the protocol is missing, or name or number are taken or not allowed.
    """
    if option not in _KINDS:
        raise ConfigError(f"there are no codecs for the option {option!r}; choose one of {', '.join(_KINDS)}")
    protocol, table = _KINDS[option]
    missing = [name for name in vars(protocol) if not name.startswith("_") and not hasattr(codec, name)]
    if missing:
        raise ConfigError(f"{codec!r} is no {protocol.__name__}: it lacks {', '.join(missing)}")
    taken = {other.name: int(other.id) for other in table.values()}
    require_unused("codec", codec.name, codec.id, numbers=FREE_NUMBERS, reserved=("auto",), taken=taken)
    table[codec.name] = codec


def index_codec_names() -> tuple[str, ...]:
    """Return the names of all index codecs."""
    return tuple(_INDEX_CODECS)


def value_codec_names() -> tuple[str, ...]:
    """Return the names of all value codecs."""
    return tuple(_VALUE_CODECS)


def index_codec(name: str) -> IndexCodec:
    """Return the index codec of this name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    if name not in _INDEX_CODECS:
        raise _unknown(name, "indices", _INDEX_CODECS)
    return _INDEX_CODECS[name]


def value_codec(name: str) -> ValueCodec:
    """Return the value codec of this name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    if name not in _VALUE_CODECS:
        raise _unknown(name, "values", _VALUE_CODECS)
    return _VALUE_CODECS[name]


@lru_cache(maxsize=1024)
def smallest_index_codec(n: int, k: int) -> IndexCodec:
    """Return the codec whose reserve for k entries below n is the smallest; ties go to the quickest to decode.

    Raises:
        ConfigError: k is not within 0..n, or n is negative or beyond every codec.
    """
    reserves = {}
    refusal: ConfigError | None = None
    for codec in _OWN_INDEX_CODECS:
        try:
            reserves[codec] = codec.max_bytes(n, k)
        except ConfigError as error:  # too large a bucket for this codec
            refusal = error
    if not reserves:
        assert refusal is not None
        raise refusal
    return min(reserves, key=reserves.__getitem__)


def resolve_index_codec(name: str, n: int, k: int) -> IndexCodec:
    """Return the codec for ``indices=``: a codec's name, or "auto" for the smallest one for k of n elements.

    Raises:
        ConfigError: unknown name, or no codec for these sizes.
    """
    if name == "auto":
        return smallest_index_codec(n, k)
    if name not in _INDEX_CODECS:
        raise _unknown(name, "indices", (*_INDEX_CODECS, "auto"))
    return _INDEX_CODECS[name]


def _unknown(name: str, option: str, known: Iterable[str]) -> ConfigError:
    return ConfigError(f"{option}={name!r} is unknown. Choose one of {', '.join(repr(each) for each in known)}.")
