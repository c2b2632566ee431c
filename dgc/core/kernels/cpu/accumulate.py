"""The pass over memory: momentum correction of one chunk, and the entries of ``|v|`` that reach a threshold.

20 bytes an element in float32: g, u and v are read, u and v written, each once. LANES entries at a time are updated in
registers and compared with the threshold; the comparison leaves one mask of LANES bits, and only a mask that is not 0
(one in ten at a density of 0.1 %) costs a branch. Infinity is above every threshold, so that the same mask also shows
an update that is not finite before anything was stored; such a block is computed again entry by entry.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, types

from dgc.core.kernels.compile import helper
from dgc.core.kernels.cpu.simd import (
    AHEAD,
    LANES,
    add,
    at_address,
    bits_of,
    load,
    load_bfloat,
    load_half,
    lowest_bit,
    multiply,
    prefetch,
    reaching,
    splat,
    store,
    threshold,
)
from dgc.core.kernels.cpu.work_table import (
    DECAY,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    FORM,
    GRADIENT,
    GRADIENT_TYPE,
    LENGTH,
    MOMENTUM,
    NESTEROV,
    NO_MOMENTUM,
    OFFSET,
    PARAMETER,
    PARAMETER_TYPE,
    SCALE,
)

STRIP = 4096
"""Elements of another type that are widened at a time: they stay in the first two caches."""

_UINT64_1 = np.uint64(1)


@helper
def magnitude_mask(itemsize: int) -> int:
    """Bits of a float without its sign."""
    return 0x7FFFFFFF if itemsize == 4 else 0x7FFFFFFFFFFFFFFF


@helper
def infinity_key(itemsize: int) -> int:
    """Bits of infinity."""
    return 0x7F800000 if itemsize == 4 else 0x7FF0000000000000


@helper
def key_of(value: float, like: np.ndarray) -> int:
    """Bits of a magnitude, rounded to the type of ``like``, (1,) scratch."""
    like[0] = value
    return np.int64(bits_of(like)[0])  # type: ignore[return-value]


@helper
def value_of(key: int, like: np.ndarray) -> float:
    """The magnitude whose bits ``key`` is, in float64."""
    bits_of(like)[0] = key
    return np.float64(like[0])


@helper
def _entry_by_entry(form, decays, g, g0, p, p0, u, v, bits, start, stop, m, decay, scale):
    """Update ``start`` to ``stop``, entries of G that are not finite as 0; returns whether there was one.

    Where finite values add up to infinity, u and v stay what they were, and that counts as one.
    """
    mask, infinity = magnitude_mask(v.itemsize), infinity_key(v.itemsize)
    nonfinite = False
    for i in range(start, stop):
        x = g[i - g0] * scale
        if decays:
            x += p[i - p0] * decay
        # v's place serves to look at the bits; its old value is back before it is used.
        old = v[i]
        v[i] = x
        if bits[i] & mask >= infinity:
            nonfinite = True
            x = v.dtype.type(0)
        if form == NO_MOMENTUM:
            velocity = x
            v[i] = old + x
        else:
            velocity = m * u[i] + x
            v[i] = old + (x + m * velocity) if form == NESTEROV else old + velocity
        if bits[i] & mask >= infinity:
            nonfinite = True
            v[i] = old
        elif form != NO_MOMENTUM:
            u[i] = velocity
    return nonfinite


@helper
def _sweep(form, decays, g, g0, p, p0, u, v, bits, start, stop, m, decay, scale, key, positions, values, n, full):
    """Update ``start`` to ``stop``; append what reaches ``key`` at place n, until a block begins beyond ``full``.

    g and p begin at the bucket's places g0 and p0. Returns the new n and whether a non-finite entry was met.
    """
    mask, infinity = magnitude_mask(v.itemsize), infinity_key(v.itemsize)
    ms, decays_, scales = splat(m), splat(decay), splat(scale)
    keys, infinities = threshold(v, key), threshold(v, infinity)
    nonfinite = False
    i = start
    while i + LANES <= stop:
        prefetch(g, i - g0 + AHEAD)
        prefetch(v, i + AHEAD)
        if form != NO_MOMENTUM:
            prefetch(u, i + AHEAD)
        if decays:
            prefetch(p, i - p0 + AHEAD)
        x = multiply(load(g, i - g0), scales)
        if decays:
            x = add(x, multiply(load(p, i - p0), decays_))
        if form == NO_MOMENTUM:
            velocity = x
            y = add(load(v, i), x)
        else:
            velocity = add(multiply(ms, load(u, i)), x)
            y = add(load(v, i), add(x, multiply(ms, velocity)) if form == NESTEROV else velocity)
        found = reaching(y, keys)
        if found != 0 and reaching(y, infinities) != 0:
            nonfinite |= _entry_by_entry(form, decays, g, g0, p, p0, u, v, bits, i, i + LANES, m, decay, scale)
            found = reaching(load(v, i), keys)
        else:
            store(v, i, y)
            if form != NO_MOMENTUM:
                store(u, i, velocity)
        if found != 0 and n <= full:
            while found != 0:
                j = i + lowest_bit(found)
                positions[n] = j
                values[n] = v[j]
                n += 1
                found &= found - _UINT64_1
        i += LANES
    if i < stop:
        nonfinite |= _entry_by_entry(form, decays, g, g0, p, p0, u, v, bits, i, stop, m, decay, scale)
        if n <= full:
            for j in range(i, stop):
                if bits[j] & mask >= key:
                    positions[n] = j
                    values[n] = v[j]
                    n += 1
    return n, nonfinite


@helper
def widen(address, code, start, count, out):
    """Elements ``start`` to ``start + count`` of the array of type ``code`` at ``address``, in ``out``'s type."""
    # Slices, so that indices start at 0: one that might be negative would be a branch in each loop.
    out = out[:count]
    if code == FLOAT32:
        single = carray(at_address(address), (start + count,), types.float32)[start:]
        for i in range(count):
            out[i] = single[i]
    elif code == FLOAT64:
        double = carray(at_address(address), (start + count,), types.float64)[start:]
        for i in range(count):
            out[i] = double[i]
    else:
        words = carray(at_address(address), (start + count,), types.uint16)[start:]
        whole = count // LANES * LANES
        if code == FLOAT16:
            for i in range(0, whole, LANES):
                store(out, i, load_half(words, i))
            for i in range(whole, count):
                out[i] = _half(words[i])
        else:
            for i in range(0, whole, LANES):
                store(out, i, load_bfloat(words, i))
            bits = np.empty(1, np.uint32)
            for i in range(whole, count):
                bits[0] = np.uint32(words[i]) << np.uint32(16)
                out[i] = bits.view(np.float32)[0]


@helper
def _half(word):
    """The number whose float16 bits ``word`` is."""
    exponent, fraction = (np.int64(word) >> 10) & 31, np.int64(word) & 1023
    if exponent == 31:
        value = np.nan if fraction else np.inf
    elif exponent == 0:
        value = fraction * 2.0**-24
    else:
        value = math.ldexp(float(1024 + fraction), exponent - 25)  # type: ignore[arg-type]
    return -value if word & 0x8000 else value


@helper
def sweep_chunk(integers, reals, s, start, stop, u, v, bits, key, wide, positions, values, n, full):
    """Update elements ``start`` to ``stop`` of segment s, as ``_sweep``. ``wide``: (2 * STRIP,) scratch of v's type."""
    offset, length = integers[s, OFFSET], integers[s, LENGTH]
    form, decays = integers[s, FORM], integers[s, PARAMETER] != 0
    kind = v.dtype.type
    m, decay, scale = kind(reals[s, MOMENTUM]), kind(reals[s, DECAY]), kind(reals[s, SCALE])
    own = FLOAT32 if v.itemsize == 4 else FLOAT64
    g_direct = integers[s, GRADIENT_TYPE] == own
    p_direct = not decays or integers[s, PARAMETER_TYPE] == own
    gradient = carray(at_address(integers[s, GRADIENT]), (length,), v.dtype)
    parameter = carray(at_address(integers[s, PARAMETER]), (length,), v.dtype)
    step = stop - start if g_direct and p_direct else STRIP
    nonfinite = False
    for low in range(start, stop, step):
        high = min(low + step, stop)
        g, g0, p, p0 = gradient, offset, parameter, offset
        if not g_direct:
            g, g0 = wide[:STRIP], offset + low
            widen(integers[s, GRADIENT], integers[s, GRADIENT_TYPE], low, high - low, g)
        if not p_direct:
            p, p0 = wide[STRIP:], offset + low
            widen(integers[s, PARAMETER], integers[s, PARAMETER_TYPE], low, high - low, p)
        n, met = _sweep(
            form, decays, g, g0, p, p0, u, v, bits, offset + low, offset + high,
            m, decay, scale, key, positions, values, n, full,
        )  # fmt: skip
        nonfinite |= met
    return n, nonfinite
