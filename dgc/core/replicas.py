"""Do all ranks train the same model? Asked once per compressor, with a few values of every parameter.

A broadcast that was forgotten leaves every rank with a model of its own: the averaged gradients fit none of them, the
loss may still go down, and nothing else would tell.

P = number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dgc.core.errors import ConfigError
from dgc.core.transport import Transport

_SAMPLES = 8
_TOLERANCE = 1e-3
"""Relative. Ranks on unlike machines may round a first step differently; models that were never alike differ more."""


def sample_places(numel: int) -> np.ndarray:
    """(at most 8,) int64: places of a flat tensor that are compared, spread over all of it."""
    return np.unique(np.linspace(0, numel - 1, _SAMPLES).astype(np.int64)) if numel else np.empty(0, np.int64)


def require_replicas(transport: Transport, values: Mapping[str, np.ndarray], advice: str) -> None:
    """Raise the same error on every rank unless all ranks hold the same values. Collective.

    Args:
        transport: connects the ranks.
        values: name -> a few values, (m,); the same names and m on every rank.
        advice: what to do, for the message.

    Raises:
        ConfigError: they differ by more than rounding explains; names the first difference.
        TransportError: the ranks could not be asked.
    """
    own = np.concatenate([np.asarray(v, np.float64).reshape(-1) for v in values.values()] or [np.empty(0)])
    if own.size == 0:
        return
    table = np.empty((transport.size, own.nbytes), np.uint8)
    transport.allgather(own.view(np.uint8), table)
    rows = table.view(np.float64)
    begin = 0
    for name, value in values.items():
        part = rows[:, begin : begin + value.size]
        begin += value.size
        scale = np.abs(part[0], where=np.isfinite(part[0]), out=np.zeros(value.size)).max(initial=0.0)
        alike = np.isclose(part, part[0], rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)
        if not alike.all():
            other = int(np.argmin(alike.all(axis=1)))
            place = int(np.argmin(alike[other]))
            raise ConfigError(
                f"the ranks do not train the same model: {name!r} has the value {part[0, place]:.6g} on rank 0 and "
                f"{part[other, place]:.6g} in the same place on rank {other}; {advice}"
            )
