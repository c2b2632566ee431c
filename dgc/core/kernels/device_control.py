"""The threshold control of all segments of a bucket, on the host, in the form that the device's tables have.

The rules are those of the CPU backend (``control``); the numbers that go in come from the device with the message, so
that the next thresholds cost no wait of their own, and rows stay equal to the CPU's bit for bit. S segments.
"""

from __future__ import annotations

import math

import numpy as np

# candidates also registers the rules with Numba.
from dgc.core.kernels import candidates as _  # noqa: F401
from dgc.core.kernels import control as rules
from dgc.core.kernels.jit import entry

NEVER = 2**63 - 1
"""A key that no entry reaches."""


@entry()
def _thresholds(control, ks, lengths, out, most):  # type: ignore[no-untyped-def]
    for s in range(len(ks)):
        out[s] = rules.threshold(control[s], ks[s], lengths[s])
        most[s] = rules.most_candidates(ks[s], lengths[s])


@entry()
def _learn(control, ks, used, totals, kths, wider):  # type: ignore[no-untyped-def]
    for s in range(len(ks)):
        if ks[s] == 0:
            continue
        kth, reached = kths[s], used[s]
        if kth < 0:
            # Fewer candidates than k: everything that is not zero, or an estimate.
            kth = rules.estimate(control[s], ks[s], reached, totals[s]) if reached > 0 else 0.0
        elif wider[s]:
            reached = rules.WIDER * kth
        rules.learn(control[s], ks[s], reached, totals[s], kth)


def set_thresholds(table: np.ndarray, control: np.ndarray | None, dtype: np.dtype, whole: int) -> np.ndarray:
    """Fill the columns of a SEGMENT table that depend on the control.

    Args:
        table: (S,) of SEGMENT with k and length, in place.
        control: (S, COLUMNS) float64; None collects nothing at all.
        dtype: the state's type, to which thresholds are rounded.
        whole: the code of a segment that is searched as a whole after the pass; others get 0.

    Returns:
        (S,) float64, the thresholds as they will be used; 0 where every entry that is not zero is a candidate.
    """
    table["source"] = whole
    table["key"] = NEVER
    if control is None:
        return np.zeros(len(table))
    ks, lengths = table["k"].astype(np.int64), table["length"].astype(np.int64)
    used, most = np.empty(len(table)), np.empty(len(table), np.int64)
    _thresholds(control, ks, lengths, used, most)
    with np.errstate(over="ignore"):
        rounded = used.astype(dtype)
    keys = np.maximum(rounded.view(f"u{dtype.itemsize}").astype(np.uint64), np.uint64(1))
    collects = np.isfinite(rounded) & (ks > 0)
    table["key"] = np.where(collects, keys, np.uint64(NEVER))
    # Nothing to send from a segment: it has no candidates, which is all of them.
    table["source"] = np.where(collects | (ks == 0), 0, whole)
    table["open"] = keys > 1
    # As the CPU backend decides: too few when total < ENOUGH * k.
    table["fewest"] = np.ceil(rules.ENOUGH * ks).astype(np.int64)
    most = np.where(collects, most, 0)
    table["most"] = most
    table["room"] = np.cumsum(most) - most
    return np.where(collects & (keys > 1), rounded.astype(np.float64), 0.0)


def learn(
    control: np.ndarray,
    ks: np.ndarray,
    used: np.ndarray,
    totals: np.ndarray,
    kth_keys: np.ndarray,
    wider: np.ndarray,
    dtype: np.dtype,
) -> None:
    """Update the control after a pass.

    Args:
        control: (S, COLUMNS) float64, in place.
        ks: (S,) entries that were to be selected.
        used: (S,) float64 thresholds.
        totals: (S,) entries that reached them.
        kth_keys: (S,) uint64 keys of the k-th largest; NEVER where there were fewer candidates than k.
        wider: (S,) bool, where the entries were counted at WIDER times the k-th largest magnitude instead.
        dtype: the state's type.
    """
    bits = np.dtype(f"u{dtype.itemsize}")
    short = kth_keys == NEVER
    kths = np.where(short, 0, kth_keys).astype(bits).view(dtype).astype(np.float64)
    kths[short] = -1.0
    # A key beyond infinity is a NaN; the rules take both for "unknown".
    kths[np.isnan(kths)] = math.inf
    _learn(control, ks.astype(np.int64), used, totals.astype(np.int64), kths, wider)
