"""Compare options, parameters and the parameters' values between ranks, before any gradient is sent.

Ranks that disagree on an option or on a parameter would hang, or decode each other's messages wrongly. So every rank
describes itself at construction, and all ranks compare the descriptions. A difference, or an error on one rank, becomes
an error on every rank.

Once per compressor the ranks also compare a few values of every parameter. If a script has not broadcast the initial
parameters, each rank trains a different model. The averaged gradients fit none of them, but the loss may still fall.

P = number of ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from dgc import errors
from dgc.core.collectives import LENGTH_BYTES, Transport, gather_rows, gather_texts
from dgc.errors import ConfigError, DGCError, RemoteError, TransportError

T = TypeVar("T")

ERROR_KEY = "__error__"  # a rank that could not build its description sends its error under this key

_DIGEST_BYTES = 16
_GROUPS_SHOWN = 8
_VALUE_CHARACTERS = 200


def require_agreement(
    transport: Transport,
    description: Mapping[str, Any],
    what: str,
    error: type[DGCError] = ConfigError,
    advice: str | None = None,
) -> None:
    """Raise the same error on every rank unless all ranks gave the same description.

    If the ranks agree, this costs one allgather of 24 bytes per rank. Collective: every rank must call it at the same
    point.

    Args:
        transport: connects the ranks.
        description: ordered names and values, such as options, or a parameter's name and "shape dtype". Values are
            compared by their JSON text, so NaN equals NaN; values of other types are compared by their ``repr``.
        what: the subject of the error message: "options of the compressor", "parameters".
        error: class of the error about a difference.
        advice: the end of the error message, which says what to do.

    Raises:
        DGCError: the descriptions differ. The error is of class ``error``. It names the first key that differs, in
            rank 0's order, with each rank's value.
        RemoteError: another rank failed. If its error is one of this package's, that class is raised instead.
        TransportError: a collective failed.
    """
    descriptions = gather_if_different(transport, description)
    if descriptions is None:
        if ERROR_KEY not in description:
            return
        descriptions = [_decode(_encode(description))] * transport.size
    _raise_remote_error(descriptions)
    difference = _first_difference(descriptions)
    if difference is not None:
        raise error(f"{what} differ between ranks: {difference}. {advice or f'Give every rank the same {what}.'}")


def agree_or_raise(
    transport: Transport,
    build: Callable[[], Mapping[str, Any]],
    what: str = "descriptions",
    error: type[DGCError] = ConfigError,
    advice: str | None = None,
) -> Mapping[str, Any]:
    """Run ``build`` on every rank and require that all ranks built the same description.

    ``build`` does the local work of a construction and returns this rank's description. If it raises, this rank gets
    the exception, and the others get an error that holds this rank's number and message. For the other arguments see
    :func:`require_agreement`.
    """
    try:
        description = build()
    except Exception as own_error:
        tell_error(transport, own_error)
        raise
    require_agreement(transport, description, what, error, advice)
    return description


def built_together(transport: Transport, build: Callable[[], T]) -> T:
    """Return ``build()``, unless it raises on a rank: then raise an error on all ranks. Collective."""
    built: list[T] = []

    def described() -> dict[str, str]:
        built.append(build())
        return {}

    agree_or_raise(transport, described)
    return built[0]


def any_true(transport: Transport, value: bool) -> bool:
    """Return whether ``value`` is true on some rank. Collective; a rank may call :func:`tell_error` instead."""
    descriptions = gather_if_different(transport, {"value": value})
    if descriptions is None:
        return value
    _raise_remote_error(descriptions)
    return True


def tell_error(transport: Transport, error: Exception) -> None:
    """Send an error to the ranks that wait in another function of this module. Collective."""
    report(error, lambda described: gather_if_different(transport, {ERROR_KEY: described}))


def report(error: Exception, gather: Callable[[list[str]], object]) -> None:
    """Send an error's class and message through ``gather``. If that fails, add a note to the error."""
    try:
        gather([type(error).__name__, str(error)])
    except TransportError as lost:
        # This does what add_note() does, which Python 3.10 lacks.
        note = f"and this could not be reported to the other ranks: {lost}"
        error.__notes__ = [*getattr(error, "__notes__", []), note]


def _raise_remote_error(descriptions: Sequence[Mapping[str, str]]) -> None:
    for rank, description in enumerate(descriptions):
        if ERROR_KEY in description:
            raise error_of(rank, *json.loads(description[ERROR_KEY]))


def error_of(rank: int, name: str, message: str) -> DGCError:
    """Return the error that another rank has sent by :func:`report`."""
    own_class = getattr(errors, name, None)
    if isinstance(own_class, type) and issubclass(own_class, DGCError):
        return own_class(f"rank {rank}: {message}")
    return RemoteError(f"rank {rank} failed: {name}: {message}")


def _encode(description: Mapping[str, Any]) -> bytes:
    return json.dumps([[str(key), _value_text(value)] for key, value in description.items()]).encode()


def _value_text(value: object) -> str:
    try:
        return json.dumps(value, sort_keys=True, default=repr)
    except (TypeError, ValueError):
        # JSON cannot sort the keys, or a value contains itself.
        return json.dumps(repr(value))


def _decode(text: bytes) -> dict[str, str]:
    return dict(json.loads(text))


def gather_if_different(transport: Transport, description: Mapping[str, Any]) -> list[dict[str, str]] | None:
    """Return all ranks' descriptions as key -> JSON text in rank order; None if all are equal. Collective."""
    text = _encode(description)
    head = hashlib.sha256(text).digest()[:_DIGEST_BYTES] + len(text).to_bytes(LENGTH_BYTES, "little")
    heads = gather_rows(transport, np.frombuffer(head, np.uint8))
    if (heads == heads[0]).all():
        return None
    lengths = [int.from_bytes(row[_DIGEST_BYTES:].tobytes(), "little") for row in heads]
    return [_decode(each) for each in gather_texts(transport, text, lengths)]


def _first_difference(descriptions: Sequence[Mapping[str, str]]) -> str | None:
    for key in {key: None for description in descriptions for key in description}:
        values = [description.get(key, "(missing)") for description in descriptions]
        if len(set(values)) > 1:
            return f"{key!r} is {_by_value(values)}"
    for position, names in enumerate(zip(*descriptions, strict=True)):
        if len(set(names)) > 1:
            return f"the order differs, number {position} is {_by_value([json.dumps(name) for name in names])}"
    return None


def _by_value(values: Sequence[str]) -> str:
    """Return each distinct value with its ranks: "0.9 on ranks 0-2 and 0.5 on rank 3"."""
    shown = []
    for value in dict.fromkeys(values):
        text = value if len(value) <= _VALUE_CHARACTERS else value[: _VALUE_CHARACTERS - 3] + "..."
        shown.append(f"{text} on {_rank_list([rank for rank, own in enumerate(values) if own == value])}")
    if len(shown) > _GROUPS_SHOWN:
        shown[_GROUPS_SHOWN:] = [f"{len(shown) - _GROUPS_SHOWN} more values on other ranks"]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def _rank_list(ranks: Sequence[int]) -> str:
    # In a run of consecutive ranks, rank minus index is constant.
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    names = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(names)


_SAMPLES = 8


def sample_places(numel: int) -> np.ndarray:
    """Return up to 8 places, int64, spread over a flat tensor. The ranks compare the elements there."""
    return np.unique(np.linspace(0, numel - 1, _SAMPLES).astype(np.int64)) if numel else np.empty(0, np.int64)


def require_replicas(
    transport: Transport,
    values: Mapping[str, np.ndarray],
    advice: str,
    *,
    sums: Sequence[int] = (),
    tolerance: float = 0.0,
) -> None:
    """Raise the same error on every rank unless all ranks hold the same tensors. Collective.

    Args:
        transport: connects the ranks.
        values: a few values of each tensor, by the tensor's name.
        advice: the end of the error message, which says what to do.
        sums: for each tensor, a number below 2**52 that depends on all of its values.
        tolerance: how much values may differ, relative to the largest value of their tensor.

    Raises:
        ConfigError: a tensor differs between ranks; the message names the first such tensor.
        TransportError: a collective failed.
    """
    own = np.concatenate([*(np.asarray(v, np.float64).reshape(-1) for v in values.values()), np.asarray(sums, float)])
    if own.size == 0:
        return
    rows = gather_rows(transport, own.view(np.uint8)).view(np.float64)
    begin, all_sums = 0, rows[:, own.size - len(sums) :]
    for i, (name, value) in enumerate(values.items()):
        part = rows[:, begin : begin + value.size]
        begin += value.size
        scale = np.abs(part[0], where=np.isfinite(part[0]), out=np.zeros(value.size)).max(initial=0.0)
        same = np.isclose(part, part[0], rtol=tolerance, atol=tolerance * scale, equal_nan=True)
        wrong = None
        if not same.all():
            other = int(np.argmin(same.all(axis=1)))
            place = int(np.argmin(same[other]))
            wrong = (
                f"has the value {part[0, place]:.9g} on rank 0 and {part[other, place]:.9g} in the same place on rank "
                f"{other}"
            )
        elif sums and (all_sums[:, i] != all_sums[0, i]).any():
            wrong = f"has other values on rank {int(np.argmax(all_sums[:, i] != all_sums[0, i]))} than on rank 0"
        if wrong is not None:
            raise ConfigError(f"the ranks do not train the same model: {name!r} {wrong}; {advice}")
