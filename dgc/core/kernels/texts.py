"""The passes of size n over a bucket as short texts of CUDA C++, which CuPy compiles for a device.

Each is a ``cupy.ElementwiseKernel`` over the flat space of a bucket: CuPy makes the loop over i around it. Tensors are
addressed by a table, one ROW each, and ``owner[i >> shift]`` is the tensor that element i belongs to, -1 for none. So
one launch serves a whole bucket, however many tensors it has.

Sums and products are rounded one by one, as on the CPU (``--fmad=false``). CuPy always adds ``-ftz=true``: numbers
below 1.2e-38 in magnitude count as 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROW = np.dtype(
    [(n, "u8") for n in ("gradient", "parameter", "result")]
    + [(n, "i8") for n in ("start", "length")]
    + [(n, "f8") for n in ("momentum", "decay", "scale", "limit")]
    + [(n, "i4") for n in ("gradient_kind", "parameter_kind", "form", "most")]
)
"""A tensor in a pass: addresses, its place in the flat space, the options of its momentum SGD, and a limit: the least
magnitude of a candidate, of which ``most`` are kept, or the largest that a result may have. ``form``: 0 no momentum, 1
heavy ball, 2 Nesterov."""

KINDS = {np.dtype(t): i for i, t in enumerate((np.float32, np.float64, np.float16, np.uint16))}
"""Codes of element types; uint16 are the bits of bfloat16."""

OPTIONS = ("--fmad=false",)

PREAMBLE = r"""
struct Row {
    unsigned long long gradient, parameter, result;
    long long start, length;
    double momentum, decay, scale, limit;
    int gradient_kind, parameter_kind, form, most;
};
template <class T> struct Entry { T value; int place; };
// float16 -> float32 exactly, though CuPy always compiles with -ftz=true: no denormal float32 is met on the way.
__device__ __forceinline__ float half(unsigned bits) {
    const unsigned exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
    float x = exponent ? __int_as_float((int)((exponent == 31 ? 0xff : exponent + 112) << 23 | mantissa << 13))
                       : (float)mantissa * 5.9604644775390625e-8f;
    return bits & 0x8000 ? -x : x;
}
template <class T> __device__ __forceinline__ T load(unsigned long long array, int kind, long long j) {
    if (kind == 0) return (T)((const float*)array)[j];
    if (kind == 1) return (T)((const double*)array)[j];
    const unsigned bits = ((const unsigned short*)array)[j];
    return (T)(kind == 2 ? half(bits) : __int_as_float((int)(bits << 16)));
}
"""

_TABLE = "raw uint8 table, raw int32 owner, int32 shift"
_FIND = """
    const int s = owner[i >> shift];
    if (s < 0) continue;
    const Row& r = ((const Row*)&table[0])[s];
    const long long j = i - r.start;
    if (j >= r.length) continue;
"""


def entry_type(kind: np.dtype) -> np.dtype:
    """A candidate as the sweep writes it: its value and its place in the bucket."""
    return np.dtype([("value", kind), ("place", np.int32)], align=True)


@dataclass(frozen=True)
class Text:
    """One kernel: its parameters as CuPy writes them, and what it does with element i."""

    inputs: str
    outputs: str
    body: str


TEXTS = {
    # u <- m*u + G, v <- v + u, and candidates appended to the entries in any order. ``met``: how many entries there
    # are, whether a value was not finite, then each tensor's candidates; beyond ``most`` they are not kept.
    "sweep": Text(
        f"{_TABLE}",
        "T u, T v, raw int32 met, raw uint8 entries",
        _FIND
        + """
    T g = load<T>(r.gradient, r.gradient_kind, j) * (T)r.scale;
    if (r.decay != 0) g += load<T>(r.parameter, r.parameter_kind, j) * (T)r.decay;
    bool bad = !isfinite(g);
    if (bad) g = 0;
    const T m = (T)r.momentum;
    const T velocity = r.form ? m * u + g : g;
    const T sum = v + (r.form == 2 ? g + m * velocity : velocity);
    if (isfinite(sum)) {
        if (r.form) u = velocity;
        v = sum;
    } else bad = true;
    if (bad) met[1] = 1;
    if (v != 0 && fabs(v) >= (T)r.limit && atomicAdd(&met[2 + s], 1) < r.most) {
        Entry<T>& entry = ((Entry<T>*)&entries[0])[atomicAdd(&met[0], 1)];
        entry.value = v, entry.place = i;
    }
""",
    ),
    # Gradients side by side, zeros between them.
    "pack": Text(
        _TABLE,
        "T out, raw int32 met",
        "    out = 0;"
        + _FIND
        + """
    out = load<T>(r.gradient, r.gradient_kind, j) * (T)r.scale;
    if (!isfinite(out)) met[1] = 1;
""",
    ),
    # Momentum SGD on means, into the results; or dry, whether a result would be beyond its limit.
    "update": Text(
        f"{_TABLE}, T mean, bool dry",
        "T u, raw int32 met",
        _FIND
        + """
    T g = mean;
    if (r.decay != 0) g += load<T>(r.parameter, r.parameter_kind, j) * (T)r.decay;
    if (r.form) {
        const T m = (T)r.momentum, velocity = m * u + g;
        if (!dry) u = velocity;
        g = r.form == 2 ? g + m * velocity : velocity;
    }
    g *= (T)r.scale;
    if (!dry) ((T*)r.result)[j] = g;
    else if (!(fabs(g) <= (T)r.limit)) met[1] = 1;
""",
    ),
    # Whether a result that was written is beyond its limit.
    "check": Text(
        f"{_TABLE}, raw T like",
        "raw int32 met",
        _FIND + "if (!(fabs(((const T*)r.result)[j]) <= (T)r.limit)) met[1] = 1;",
    ),
    "clear": Text(_TABLE, "raw T like", _FIND + "((T*)r.result)[j] = 0;"),
    # Entries, which are ascending and unique, onto the results.
    "place": Text(
        f"{_TABLE}, int64 at, T value",
        "raw T like",
        _FIND.replace("[i >> shift]", "[at >> shift]").replace("i - r.start", "at - r.start")
        + "((T*)r.result)[j] += value;",
    ),
    "take_out": Text("int64 at, T sent, bool masking", "raw T u, raw T v", "v[at] -= sent; if (masking) u[at] = 0;"),
}
