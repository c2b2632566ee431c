"""What every transport demands of its arrays, and the one order in which ranks are summed.

P = number of ranks, m = message bytes, n = elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dgc.errors import TransportError

BYTE_LIMIT = 2**31 - 1
"""Largest buffer of one collective: MPI counts elements in a signed 32-bit integer."""

REDUCTIONS = {"sum": np.add, "max": np.maximum}
"""Reductions by name. ``np.maximum`` keeps a NaN wherever it comes from; MPI_MAX lets the order of ranks decide."""


def check_allgather(message: np.ndarray, out: np.ndarray, size: int) -> None:
    """Refuse arrays that an allgather over ``size`` ranks cannot take.

    Args:
        message: (m,) uint8, contiguous.
        out: (P, m) uint8, contiguous, writeable.
        size: number of ranks, P.

    Raises:
        TransportError: says what was given and what is allowed.
    """
    if message.dtype != np.uint8 or message.ndim != 1 or not message.flags.c_contiguous:
        raise TransportError(f"allgather takes a contiguous 1-D uint8 message, got {_describe(message)}")
    if message.nbytes > BYTE_LIMIT:
        raise TransportError(f"a message must stay below 2 GiB, got {message.nbytes} bytes: use smaller buckets")
    fits = out.dtype == np.uint8 and out.shape == (size, message.size) and out.flags.c_contiguous
    if not fits or not out.flags.writeable:
        raise TransportError(
            f"allgather of {message.size} bytes over {size} ranks writes a contiguous uint8 array of shape "
            f"({size}, {message.size}), got {_describe(out)}"
        )


def check_allreduce(array: np.ndarray, op: str) -> None:
    """Refuse an array or a reduction that no transport takes.

    Args:
        array: (n,) float32 or float64, contiguous, writeable.
        op: "sum" or "max".

    Raises:
        TransportError: says what was given and what is allowed.
    """
    if op not in REDUCTIONS:
        raise TransportError(f"allreduce knows {sorted(REDUCTIONS)}, got op={op!r}")
    if array.dtype not in (np.float32, np.float64) or array.ndim != 1:
        raise TransportError(f"allreduce takes a 1-D float32 or float64 array, got {_describe(array)}")
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise TransportError(f"allreduce works in place on a contiguous, writeable array, got {_describe(array)}")
    if array.nbytes > BYTE_LIMIT:
        raise TransportError(f"an array must stay below 2 GiB, got {array.nbytes} bytes: use smaller buckets")


def reduce_in_rank_order(parts: Sequence[np.ndarray] | np.ndarray, op: str, out: np.ndarray) -> None:
    """Fold the ranks' arrays from rank 0 upwards, ``((p0 + p1) + p2) + ...``.

    The order is fixed, so equal inputs give equal bits on every rank, on every transport that uses this function.

    Args:
        parts: P arrays of shape (n,) in rank order, or one of shape (P, n).
        op: "sum" or "max".
        out: (n,) same dtype, written; must not overlap ``parts`` except for being ``parts[0]`` itself.
    """
    reduction = REDUCTIONS[op]
    if out is not parts[0]:
        np.copyto(out, parts[0])
    # Overflown gradients are found and refused by the exchange; a warning on the console would add nothing.
    with np.errstate(over="ignore", invalid="ignore"):
        for part in parts[1:]:
            reduction(out, part, out=out)


def _describe(array: np.ndarray) -> str:
    traits = "" if array.flags.c_contiguous else ", not contiguous"
    traits += "" if array.flags.writeable else ", read-only"
    return f"{array.dtype.name} of shape {array.shape}{traits}"
