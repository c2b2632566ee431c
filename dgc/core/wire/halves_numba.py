"""The loops of the default codecs in Numba: one call instead of a dozen, each of which starts with cold caches.

After a compress pass the caches hold gradients, and every NumPy call pays for fetching its code again: 5 buckets of
6500 entries took 1.1 ms to encode where the same calls in a tight loop take 0.3. Imported on first use only.
"""

from __future__ import annotations

import numpy as np
from numba import types, uint32
from numba.extending import intrinsic

from dgc.core.kernels.jit import entry

_SMALLEST_NORMAL = np.uint32(0x38800000)
"""2^-14 as float32 bits: below it half precision is subnormal."""


@intrinsic
def _bits(typing_context, x):
    """The bits of a float32 as uint32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), generate


@intrinsic
def _float(typing_context, x):
    """The float32 of these bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), generate


@entry(__file__)
def largest_magnitude(values):
    """The largest magnitude's bits among (k,) float32; NaN is larger than infinity."""
    largest = uint32(0)
    for x in values:
        largest = max(largest, _bits(x) & uint32(0x7FFFFFFF))
    return largest


@entry(__file__)
def to_halves(values, factor, halves):
    """``halves[i]`` = the bits of ``values[i] * factor`` in half precision, rounded to nearest, ties to even.

    Args:
        values: (k,) float32, finite.
        factor: float32, a power of two that leaves every magnitude below 65520.
        halves: (k,) uint16, filled.
    """
    for i in range(values.size):
        bits = _bits(values[i] * factor)
        magnitude = bits & uint32(0x7FFFFFFF)
        # Added to 0.5, a subnormal half ends in float32's lowest bits, rounded by the addition itself.
        small = _bits(_float(magnitude) + np.float32(0.5)) - uint32(0x3F000000)
        odd = (magnitude >> uint32(13)) & uint32(1)
        large = (magnitude - uint32(0x38000000) + uint32(0xFFF) + odd) >> uint32(13)
        half = small if magnitude < uint32(_SMALLEST_NORMAL) else large
        halves[i] = half | ((bits >> uint32(16)) & uint32(0x8000))


@entry(__file__)
def from_halves(halves, factor, values):
    """``values[i]`` = ``halves[i] * factor`` with one rounding.

    Args:
        halves: (k,) uint16 bits of half precision numbers.
        factor: float32, a power of two.
        values: (k,) float32, filled.

    Returns:
        False when a half is infinite or NaN; the values are then to be made another way.
    """
    finite = True
    for i in range(halves.size):
        half = uint32(halves[i])
        magnitude = (half & uint32(0x7FFF)) << uint32(13)
        normal = _float(magnitude + uint32(0x38000000))
        subnormal = _float(magnitude + uint32(0x38800000)) - np.float32(6.103515625e-05)
        x = subnormal if magnitude < uint32(0x800000) else normal
        finite &= magnitude < uint32(0xF800000)
        values[i] = _float(_bits(x) | ((half & uint32(0x8000)) << uint32(16))) * factor
    return finite


@entry(__file__)
def to_tiles(positions, counts, offsets):
    """Split positions into tiles of 65 536.

    Args:
        positions: (k,) int64, ascending.
        counts: (tiles,) uint32, receives the number of positions in each tile.
        offsets: (k,) uint16, receives each position's place in its tile.
    """
    i = 0
    for tile in range(counts.size):
        first = i
        end = (tile + 1) << 16
        while i < positions.size and positions[i] < end:
            offsets[i] = positions[i] & 0xFFFF
            i += 1
        counts[tile] = i - first
