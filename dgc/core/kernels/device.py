"""The kernels on a device, for arrays of CuPy or of a module with the same interface.

One launch makes one pass over a bucket. All work is enqueued on one stream of this package. Candidates are copied to
the host, which chooses among them as the CPU backend does. For each bucket the host waits once, for an event. It waits
a second time if the thresholds did not help: then it copies all elements of a segment.
"""

from __future__ import annotations

import copy
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike
from typing_extensions import override

from dgc.core.kernels.base import (
    Array,
    Kernels,
    Memory,
    MomentumRule,
    SegmentWork,
    Selection,
    bounds_in_results,
    check_taken,
    check_work,
    type_code,
)
from dgc.core.kernels.threshold import new_thresholds
from dgc.core.layout import ALIGNMENT

if TYPE_CHECKING:
    from dgc.core.kernels.sweep import Choice

# The first copy of candidates has room for MORE times the last step's number, plus FEW. If more candidates remain, a
# second copy costs another wait.
MORE, FEW = 1.25, 256
SQUARED_AT_ONCE = 1 << 22  # elements whose squares are added up together, in a float64 copy
_BYTES = 16  # alignment of arrays that are copied together


# -- the passes, as short texts of CUDA C++ ----------------------------------------------------------------------------
# Each text is the body of a ``cupy.ElementwiseKernel`` over the flat space of a bucket; CuPy adds the loop over i. A
# table has one ROW for each tensor, and ``owner[i >> shift]`` is the row of element i, or -1. So one launch serves a
# bucket with any number of tensors.
#
# Sums and products are rounded one by one, as on the CPU (``--fmad=false``). CuPy always adds ``-ftz=true``: numbers
# below 1.2e-38 in magnitude count as 0.

# A tensor in a pass: addresses, position in the flat space, options of momentum SGD. ``limit`` is the least magnitude
# of a candidate, or the largest magnitude of a result. ``most`` is the number of candidates that are kept. ``form``: 0
# no momentum, 1 heavy ball, 2 Nesterov.
ROW = np.dtype(
    [(n, "u8") for n in ("gradient", "parameter", "result")]
    + [(n, "i8") for n in ("start", "length")]
    + [(n, "f8") for n in ("momentum", "decay", "scale", "limit")]
    + [(n, "i4") for n in ("gradient_kind", "parameter_kind", "form", "most")]
)

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
    """Return the type of a candidate that the sweep writes: its value, and its position in the bucket."""
    return np.dtype([("value", kind), ("place", np.int32)], align=True)


@dataclass(frozen=True)
class Text:
    """One kernel: its parameters in CuPy's notation, and its code for element i."""

    inputs: str
    outputs: str
    body: str


TEXTS = {
    # u <- m*u + G, v <- v + u; append candidates to the entries, in any order. ``met`` gets the number of entries, 1 if
    # a value was not finite, and each tensor's number of candidates. Candidates beyond ``most`` are not kept.
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
    # Copy gradients side by side, with zeros between them.
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
    # Apply momentum SGD to means and write the results. If ``dry``, only check whether a result would exceed its limit.
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
    # Check whether a written result exceeds its limit.
    "check": Text(
        f"{_TABLE}, raw T like",
        "raw int32 met",
        _FIND + "if (!(fabs(((const T*)r.result)[j]) <= (T)r.limit)) met[1] = 1;",
    ),
    "clear": Text(_TABLE, "raw T like", _FIND + "((T*)r.result)[j] = 0;"),
    # Write entries, which are ascending and unique, to the results.
    "place": Text(
        f"{_TABLE}, int64 at, T value",
        "raw T like",
        _FIND.replace("[i >> shift]", "[at >> shift]").replace("i - r.start", "at - r.start")
        + "((T*)r.result)[j] = value;",
    ),
    "take_out": Text("int64 at, T sent, bool masking", "raw T u, raw T v", "v[at] -= sent; if (masking) u[at] = 0;"),
}


# -- the device ----------------------------------------------------------------------------------------------------


class Device(ABC):
    """A device on which this package has its own stream. ``with`` makes both current, and may be nested.

    Attributes:
        xp: the module of its arrays: CuPy.
        name: for logs.
        stream: the stream's handle.
    """

    xp: Any
    name: str
    stream: int

    @abstractmethod
    def __enter__(self) -> None: ...

    @abstractmethod
    def __exit__(self, kind: type | None, error: object, trace: TracebackType | None) -> None: ...

    @abstractmethod
    def adopt_thread(self) -> None:
        """Let the calling thread work on this device only."""

    @abstractmethod
    def allocate_with(self, allocate: Callable[[int, int], int], free: Callable[[int], None]) -> None:
        """Take device memory from a framework, because a separate pool would leave it less memory.

        Args:
            allocate: returns an address, given the number of bytes and the handle of the stream that uses them.
            free: takes an address back.
        """

    @abstractmethod
    def host_array(self, n: int, dtype: DTypeLike) -> np.ndarray:
        """Return page-locked memory, (n,), not initialised."""

    @abstractmethod
    def view(self, address: int, n: int, dtype: DTypeLike, owner: object) -> Array:
        """Return a framework's memory on this device as an array, which keeps ``owner`` alive."""

    @abstractmethod
    def upload(self, array: Array, host: np.ndarray) -> None:
        """Enqueue a copy of a page-locked array, which must not change until the copy has run."""

    @abstractmethod
    def fetch(self, array: Array, host: np.ndarray) -> None:
        """Enqueue a copy to the host."""

    @abstractmethod
    def record(self) -> Any:
        """Return an event after all work enqueued so far; its ``synchronize()`` waits without using a core."""

    @abstractmethod
    def wait_for(self, event: int) -> None:
        """Let the stream wait for another stream's event, given by its handle."""

    @abstractmethod
    def release_to(self, stream: int) -> None:
        """Let another stream, given by its handle, wait for all work enqueued so far."""

    def host_of(self, array: Array) -> np.ndarray:
        """Return a copy on the host. Waits."""
        host = self.host_array(array.size, array.dtype)
        self.fetch(array, host)
        self.record().synchronize()
        return host

    def send(self, *arrays: np.ndarray) -> list[Array]:
        """Enqueue one copy of several small arrays; return each of them on the device. They may change afterwards."""
        given = [np.ascontiguousarray(a) for a in arrays]
        stops = np.cumsum([-(-a.nbytes // _BYTES) * _BYTES for a in given]).tolist()
        joined = np.zeros(stops[-1], np.uint8)
        with self:
            for start, a in zip([0, *stops], given, strict=False):
                joined[start : start + a.nbytes] = a.view(np.uint8)
            there = self.xp.asarray(joined)  # CuPy keeps a page-locked copy until this has run
            return [there[s : s + a.nbytes].view(a.dtype) for s, a in zip([0, *stops], given, strict=False)]


class DeviceMemory(Memory):
    """See :class:`dgc.core.kernels.base.Memory`."""

    def __init__(self, device: Device, sums_of_squares: Callable[[Sequence[Array]], np.ndarray]) -> None:
        self._device, self._sums_of_squares = device, sums_of_squares

    @override
    def zeros(self, n: int, dtype: DTypeLike) -> Array:
        with self._device:
            return self._device.xp.zeros(n, dtype)

    @override
    def host_array(self, n: int, dtype: DTypeLike) -> np.ndarray:
        return self._device.host_array(n, dtype)

    @override
    def to_host(self, array: Array) -> np.ndarray:
        return self._device.host_of(array).copy()

    @override
    def copy_in(self, array: Array, values: np.ndarray) -> None:
        if values.shape != array.shape:
            raise ValueError(f"{values.shape} values for an array of {array.size} elements")
        host = self._device.host_array(array.size, array.dtype)
        host[...] = values
        self._device.upload(array, host)
        self._device.record().synchronize()

    @override
    def copy(self, array: Array, source: Array) -> None:
        with self._device:
            array[...] = source

    @override
    def fill(self, array: Array, value: float) -> None:
        with self._device:
            array.fill(value)

    @override
    def sum_of_squares(self, array: Array) -> float:
        return float(self._sums_of_squares([array])[0])


class DeviceKernels(Kernels):
    """See :class:`dgc.core.kernels.base.Kernels`. Threads that call it take turns.

    u, v, gradients, parameters and results are on the device. Positions, values and means are on the host; means are
    page-locked and must not change until the next wait.
    """

    on_device = True
    overlaps = True

    def __init__(self, device: Device) -> None:
        from dgc.core.kernels.threads import Team, default_threads

        self.device, self.name = device, device.name
        self._texts = {
            name: device.xp.ElementwiseKernel(
                t.inputs, t.outputs, t.body, f"dgc_{name}", preamble=PREAMBLE, options=OPTIONS
            )
            for name, t in TEXTS.items()
        }
        self._team, self._threads = Team(), default_threads()
        self._lock = threading.RLock()
        self._forget()

    def _forget(self) -> None:
        self.memory = DeviceMemory(self.device, self.sums_of_squares)
        # ``owner`` and ``shift`` of the tables in use. _where() builds the keys from the tensors' starts and lengths.
        self._owners: dict[Any, tuple[Array, int]] = {}
        self._expected: dict[int, int] = {}  # by the id of v: how many candidates the first copy holds

    @override
    def for_exchange(self) -> DeviceKernels:
        kernels = copy.copy(self)
        kernels._forget()
        return kernels

    @functools.cached_property
    @override
    def on_host(self) -> Kernels:
        from dgc.core.kernels.cpu import NumbaKernels  # this import loads Numba

        return NumbaKernels()

    @override
    def adopt_thread(self) -> None:
        self.device.adopt_thread()

    @override
    def wait_for(self, event: int) -> None:
        self.device.wait_for(event)

    @override
    def wait(self) -> None:
        self.device.record().synchronize()

    def warm_up(self) -> None:
        """Run each kernel once: CuPy compiles or loads a kernel when it first runs."""
        for kind in (np.float32, np.float64):
            self._warm_up(np.dtype(kind))

    def _warm_up(self, kind: np.dtype) -> None:
        n = 8192
        u, v, g, r = (self.memory.zeros(n, kind) for _ in range(4))
        self.memory.copy_in(g, np.ones(n, kind))
        thresholds, vector = new_thresholds(1), self.device.host_array(n, kind)
        if kind == np.float32:
            work = [SegmentWork(g, None, 0, n, 8, momentum=0.9)]
            for _ in range(2):  # first without a threshold, then with one
                chosen = self.accumulate_and_select(work, u, v, thresholds)
            self.take_out(u, v, chosen.positions, chosen.values, masking=True)
            self.set_entries([r], np.array([0, n]), chosen.positions, chosen.values)
        self.begin_packing([SegmentWork(g, length=n)], vector)()
        parts = [SegmentWork(length=n, momentum=0.9, result=r, limit=1.0)]
        self.exceeds(parts, vector, u, parts)
        self.update(parts, vector, u)
        self.sums_of_squares([g])
        self.memory.copy(g, r)
        self.memory.fill(r, np.nan)
        self.wait()

    # -- sparsified tensors ----------------------------------------------------------------------------------------

    @override
    def sums_of_squares(self, gradients: Sequence[Array]) -> np.ndarray:
        out = np.zeros(len(gradients))
        at_once, pieces = SQUARED_AT_ONCE, []
        for s, g in enumerate(gradients):
            pieces += [(s, g[first : first + at_once]) for first in range(0, g.size, at_once)]
        with self._lock, self.device:
            xp, space = self.device.xp, at_once + 1
            groups: list[list[tuple[int, SegmentWork]]] = []
            for s, g in pieces:
                if space + g.size > at_once:
                    groups.append([])
                    space = 0
                groups[-1].append((s, SegmentWork(g, None, space, g.size)))
                space += -(-g.size // ALIGNMENT) * ALIGNMENT
            for group in groups:
                parts = [part for _, part in group]
                wide = xp.empty(parts[-1].offset + parts[-1].length, np.float64)
                self._pack(parts, wide, xp.zeros(2, np.int32))
                wide = xp.where(xp.isfinite(wide), wide, 0.0)
                wide *= wide
                sums = self.device.host_of(xp.stack([wide[p.offset : p.offset + p.length].sum() for p in parts]))
                np.add.at(out, [s for s, _ in group], sums)
        return out

    @override
    def begin_selection(
        self, work: Sequence[SegmentWork], u: Array, v: Array, thresholds: np.ndarray | None
    ) -> Callable[[], Selection]:
        from dgc.core.kernels.sweep import Choice

        kind, entry = np.dtype(v.dtype), entry_type(np.dtype(v.dtype))
        check_work(work, u, v, thresholds)
        choice = None if thresholds is None else Choice(work, thresholds)
        with self._lock, self.device:
            room, head = 0 if choice is None else choice.room, -(-(2 + len(work)) // 4) * _BYTES
            found = self.device.xp.zeros(head + entry.itemsize * room, np.uint8)
            table, stop = self._rows(work)
            table["limit"], table["most"] = (np.inf, 0) if choice is None else (choice.limits, choice.most)
            expected = min(room, self._expected.get(id(v), room))
            # Allocate all memory before the launch, which changes u and v: after a failure, a caller may try again.
            host = self.device.host_array(head + entry.itemsize * expected, np.uint8)
            if stop:
                where, _ = self._where(table, stop)
                self._texts["sweep"](*where, u[:stop], v[:stop], found[:head].view(np.int32), found[head:])
            self.device.fetch(found[: host.size], host)
            event = self.device.record()

        def finish() -> Selection:
            event.synchronize()
            met = host[:head].view(np.int32)
            count, nonfinite = int(met[0]), bool(met[1])
            if choice is None:
                return Selection(np.empty(0, np.int64), nonfinite, np.empty(0, kind))
            self._expected[id(v)] = int(MORE * count) + FEW
            entries = host[head:]
            if expected < count:
                with self._lock:
                    more = found[head + entry.itemsize * expected : head + entry.itemsize * count]
                    entries = np.concatenate([entries, self.device.host_of(more)])
            entries = entries[: entry.itemsize * count].view(entry)
            self._choose(choice, entries, met[2 : 2 + len(work)], v)
            return choice.selection(nonfinite)

        return finish

    @override
    def take_out(self, u: Array, v: Array, positions: np.ndarray, decoded: np.ndarray, *, masking: bool) -> None:
        check_taken(positions, decoded, min(u.size, v.size))
        if positions.size:
            with self._lock, self.device:
                at, sent = self.device.send(positions, decoded.astype(v.dtype, copy=False))
                self._texts["take_out"](at, sent, bool(masking), u, v)

    @override
    def set_entries(
        self, results: Sequence[Array], offsets: np.ndarray, positions: np.ndarray, values: np.ndarray
    ) -> None:
        bounds_in_results(results, offsets, positions)
        if not results:
            return
        kind = np.dtype(results[0].dtype)
        with self._lock, self.device:
            firsts = offsets.tolist()
            parts = [SegmentWork(offset=o, length=r.size, result=r) for o, r in zip(firsts, results, strict=False)]
            table, stop = self._rows(parts)
            where, (at, added) = self._where(table, stop, positions, values.astype(kind))
            if stop:
                self._texts["clear"](*where, results[0], size=stop)
            if positions.size:
                self._texts["place"](*where, at, added, results[0])

    # -- dense tensors ---------------------------------------------------------------------------------------------

    def begin_packing(self, parts: Sequence[SegmentWork], vector: np.ndarray) -> Callable[[], bool]:
        """See :class:`dgc.core.kernels.base.Kernels`. The vector is page-locked."""
        with self._lock, self.device:
            xp = self.device.xp
            met, packed = xp.zeros(2, np.int32), xp.empty(vector.size, vector.dtype)
            self._pack(parts, packed, met)
            self.device.fetch(packed, vector)
            host = self.device.host_array(2, np.int32)
            self.device.fetch(met, host)
            event = self.device.record()

        def finish() -> bool:
            event.synchronize()
            return bool(host[1])

        return finish

    @override
    def update(self, parts: Sequence[SegmentWork], vector: np.ndarray, u: Array | None = None) -> None:
        if parts:
            with self._lock, self.device:
                mean = self._lent(vector)
                self._update(parts, mean, mean if u is None else u, self.device.xp.zeros(2, np.int32), dry=False)

    @override
    def exceeds(
        self, parts: Sequence[SegmentWork], vector: np.ndarray, u: Array, written: Sequence[SegmentWork]
    ) -> bool:
        if not (parts or written):
            return False
        with self._lock, self.device:
            met = self.device.xp.zeros(2, np.int32)
            if parts:
                self._update(parts, self._lent(vector), u, met, dry=True)
            if written:
                table, stop = self._rows(written)
                self._texts["check"](*self._where(table, stop)[0], written[0].result, met, size=stop)
            return bool(self.device.host_of(met)[1])

    @override
    def dense_update(
        self, result: Array, mean: np.ndarray, u: Array, parameter: Array | None, rule: MomentumRule
    ) -> None:
        options = (rule.momentum, rule.nesterov, rule.weight_decay, rule.scale)
        self.update([SegmentWork(None, parameter, 0, result.size, 0, *options, result)], mean, u)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _choose(self, choice: Choice, entries: np.ndarray, totals: np.ndarray, v: Array) -> None:
        """Choose among the candidates; if they do not suffice, choose among all entries of the segment."""
        missing = choice.among(entries["place"], entries["value"], totals)
        if missing.size:
            with self._lock:
                whole = self.device.host_of(v[choice.span(missing)])
            choice.among_all(missing, whole, self._team, self._threads)

    def _pack(self, parts: Sequence[SegmentWork], out: Array, met: Array) -> None:
        table, _ = self._rows(parts)
        if out.size:
            self._texts["pack"](*self._where(table, out.size)[0], out, met)

    def _update(self, parts: Sequence[SegmentWork], mean: Array, u: Array, met: Array, *, dry: bool) -> None:
        table, stop = self._rows(parts)
        if stop:
            self._texts["update"](*self._where(table, stop)[0], mean[:stop], dry, u[:stop], met)

    def _lent(self, vector: np.ndarray) -> Array:
        there = self.device.xp.empty(vector.size, vector.dtype)
        self.device.upload(there, vector)
        return there

    def _rows(self, parts: Sequence[SegmentWork]) -> tuple[np.ndarray, int]:
        """Return a table of the tensors in a pass, on the host, and where the last one ends."""
        table = np.zeros(len(parts), ROW)
        table["start"], table["length"] = [p.offset for p in parts], [p.length for p in parts]
        table["momentum"], table["scale"] = [p.momentum for p in parts], [p.scale for p in parts]
        table["form"] = [(2 if p.nesterov else 1) if p.momentum else 0 for p in parts]
        for i, p in enumerate(parts):
            row = table[i]
            if p.gradient is not None:
                row["gradient"], row["gradient_kind"] = _place_of(p.gradient, p.length, "gradient")
            if p.weight_decay and p.parameter is not None:
                row["decay"] = p.weight_decay
                row["parameter"], row["parameter_kind"] = _place_of(p.parameter, p.length, "parameter")
            row["limit"] = p.limit or 0.0
            if p.result is not None:
                row["result"], _ = _place_of(p.result, p.length, "result")
        return table, int((table["start"] + table["length"]).max(initial=0))

    def _where(self, table: np.ndarray, stop: int, *also: np.ndarray) -> tuple[tuple[Any, ...], list[Array]]:
        """Return the launch arguments for the tensors of a table, which end at ``stop``; and ``also`` on the device."""
        spans = tuple(table["start"].tolist()), tuple(table["length"].tolist())
        known = self._owners.get((spans, stop))
        if known is None:
            shift = 0 if (table["start"] % ALIGNMENT).any() else 4
            owner = np.full((stop >> shift) + 1, -1, np.int32)
            for i, (start, length) in enumerate(zip(*spans, strict=True)):
                owner[start >> shift : -(-(start + length) >> shift)] = i
            known = self._owners[spans, stop] = (self.device.send(owner)[0], shift)
        owner, shift = known
        rows, *there = self.device.send(table.view(np.uint8), *also)
        return (rows, owner, np.int32(shift)), there


def _place_of(array: Array, length: int, what: str) -> tuple[int, int]:
    return array.data.ptr, type_code(array, length, what)
