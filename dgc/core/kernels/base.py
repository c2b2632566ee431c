"""The operations of a backend, which ``reference`` (NumPy), ``cpu`` and ``device`` implement.

Letters: n elements of a bucket's flat space, S sparsified segments, k entries sent.
All arrays of one call are on the same device. u and v are float32; the u of a float64 bucket, which is dense, is
float64.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from dgc.core.kernels.threshold import COLUMNS
from dgc.core.layout import FLOAT_TYPES, MAX_BUCKET_ELEMENTS, SMALL, bounds_of
from dgc.errors import LayoutError

# An array that kernels work on: NumPy's, or CuPy's on a GPU. Arguments declared as ``np.ndarray`` are on the host.
Array: TypeAlias = Any

# Elements that have one factor in :meth:`Kernels.take_update`. A tile of the CPU's kernel is a multiple of it.
PIECE = 1024

# The number of each element type in the kernels.
TYPE_CODES = {dtype: code for code, dtype in enumerate(FLOAT_TYPES.values())}


@dataclass(slots=True)
class SegmentWork:
    """One tensor's part in a pass over a bucket.

    The pass adds ``G = gradient * scale + weight_decay * parameter`` to u and v. Entries of G that are not finite count
    as 0.

    Attributes:
        gradient: (length,) in any float type, contiguous, read only; bfloat16 also as its bits, uint16.
        parameter: (length,), of such a type, too; None without weight decay.
        k: how many entries to send.
        scale: 1 / loss scale, times the clipping factor.
        place: for a tensor that is sent dense, its part of the vector on the host, (length,).
        result: for a tensor that is sent dense, its result, (length,) of u's type.
        limit: the largest magnitude that is allowed in the result.
    """

    gradient: Array = None
    parameter: Array | None = None
    offset: int = 0
    length: int = 0
    k: int = 0
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    scale: float = 1.0
    result: Array = None
    limit: float | None = None
    place: Any = None


@dataclass(frozen=True, slots=True)
class MomentumRule:
    """Momentum SGD of one tensor in one step.

    ``G = mean + weight_decay * parameter``; ``u <- m*u + G``; ``result = scale * (u, or G + m*u with Nesterov)``.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    scale: float = 1.0


@dataclass(slots=True)
class Selection:
    """The entries to send, and whether an entry was not finite.

    Attributes:
        positions: (k,) int64 in the bucket, ascending and unique.
        values: (k,) the values of v at these positions, of v's type.
    """

    positions: np.ndarray
    nonfinite: bool
    values: np.ndarray


def is_finite(values: np.ndarray) -> bool:
    """Return whether all of (n,) values are finite."""
    # The dot product needs no temporary array. If it is finite, all values are.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(values, values)) or np.isfinite(values).all())


def multiply(x: Array, factors: Array) -> None:
    """Multiply x, (n,), by a factor for each PIECE elements, or by one for all."""
    if len(factors) == 1:
        x *= factors
        return
    count = len(x) // PIECE
    full = count * PIECE
    pieces = x[:full].reshape(count, PIECE)
    pieces *= factors[:count, None]
    x[full:] *= factors[count:]


def subtract(p: Array, place: Array, theta: Array, factors: Array | None, decay: float) -> None:
    """Replace p by ``s * (p - place) + (s - 1) * decay * theta``, (n,) each; s are the factors, or 1."""
    p -= place
    if factors is None:
        return
    multiply(p, factors)
    if decay:
        kept = theta + 0
        multiply(kept, (factors - 1) * decay)
        p += kept


def _place(theta: Array, a: Array, shares: Array | None) -> Array:
    if shares is None:
        return theta + a
    place = a + 0
    multiply(place, shares)
    place += theta
    return place


def check_work(work: Sequence[SegmentWork], u: Array, v: Array, thresholds: np.ndarray | None) -> None:
    """Refuse arrays that a pass over a bucket cannot work on."""
    if v.dtype != np.float32 or u.dtype != np.float32:
        raise LayoutError(f"u is {u.dtype} and v is {v.dtype}; both must be float32")
    if u.ndim != 1 or v.ndim != 1 or not u.flags.c_contiguous or not v.flags.c_contiguous or u.size < v.size:
        raise LayoutError("u and v must be contiguous and 1-D, u not shorter than v")
    if v.size > MAX_BUCKET_ELEMENTS:
        raise LayoutError(
            f"v has {v.size} elements; a bucket must have fewer than 2**31: choose a smaller bucket_bytes"
        )
    expected = (len(work), COLUMNS)
    if thresholds is not None and (thresholds.shape != expected or not thresholds.flags.c_contiguous):
        raise LayoutError(f"thresholds have shape {thresholds.shape}; expected {expected}, contiguous")
    for w in work:
        if w.offset < 0 or w.length < 0 or w.offset + w.length > v.size:
            raise LayoutError(f"a segment at {w.offset} of {w.length} elements does not fit into {v.size}")


def check_taken(positions: np.ndarray, decoded: np.ndarray, size: int) -> None:
    """Require one decoded value per position, and ascending positions below ``size``."""
    if positions.size and not (0 <= positions[0] and positions[-1] < size):
        raise LayoutError(f"positions {positions[0]} to {positions[-1]} do not lie within {size} elements")
    if decoded.shape != positions.shape:
        raise LayoutError(f"{decoded.size} decoded values were given for {positions.size} positions")


def type_code(array: Array, length: int, what: str) -> int:
    """Check that a kernel may read an array at its address; return the code of its type."""
    if array.ndim != 1 or array.shape[0] != length:
        raise LayoutError(f"the {what} has shape {array.shape}; expected ({length},)")
    if not (array.flags.c_contiguous and getattr(array.flags, "aligned", True)):  # CuPy's are always aligned
        raise LayoutError(f"the {what} is a strided or unaligned view; pass a contiguous copy")
    code = TYPE_CODES.get(array.dtype)
    if code is None:
        if array.dtype.name == "bfloat16":
            return TYPE_CODES[FLOAT_TYPES["bfloat16"]]
        allowed = ", ".join(FLOAT_TYPES)
        raise LayoutError(f"the {what} has type {array.dtype}; allowed: {allowed}, or bfloat16's bits as uint16")
    return code


def bounds_in_results(results: Sequence[Array], offsets: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return :func:`~dgc.core.layout.bounds_of` for the results that begin at ``offsets``."""
    return bounds_of(positions, offsets, offsets[:-1] + [r.size for r in results])


class Memory:
    """The memory of a backend's arrays; in this class, host memory and NumPy arrays. n = elements."""

    def zeros(self, n: int, dtype: DTypeLike) -> Array:
        """Return an array of zeros, (n,), that the kernels work on."""
        return np.zeros(n, dtype)

    def host_array(self, n: int, dtype: DTypeLike) -> np.ndarray:
        """Return (n,) uninitialised host memory for messages; a device's backend returns page-locked memory."""
        return np.empty(n, dtype)

    def to_host(self, array: Array) -> np.ndarray:
        """Return a copy on the host. Waits."""
        copied: np.ndarray = array.copy()
        return copied

    def copy_in(self, array: Array, values: np.ndarray) -> None:
        """Overwrite an array, (n,), with host values of any float type. Waits."""
        array[...] = values

    def copy(self, array: Array, source: Array) -> None:
        """Overwrite an array, (n,), with another one of the same type, after all work that was enqueued before."""
        array[...] = source

    def fill(self, array: Array, value: float) -> None:
        """Overwrite an array with one value, after all work that was enqueued before."""
        array.fill(value)

    def sum_of_squares(self, array: Array) -> float:
        """Return the sum of squares, added in float64. Waits."""
        # einsum needs no float64 copy of the array.
        return float(np.einsum("i,i->", array, array, dtype=np.float64))


class Kernels(abc.ABC):
    """The operations on n elements and on k selected positions.

    Several threads may call an implementation at once, each with other buckets.
    """

    name: str
    memory = Memory()  # of the arrays that the operations work on

    @property
    def on_device(self) -> bool:
        """Whether the arrays are on a GPU: then this is a :class:`~dgc.core.kernels.device.DeviceKernels`."""
        return False

    @property
    def overlaps(self) -> bool:
        """Whether :meth:`begin_selection` starts work on other threads or a device, before its result is called."""
        return False

    def for_exchange(self) -> Kernels:
        """Return kernels for one exchange. Their memory for its layout is freed together with the exchange."""
        return self

    @property
    def on_host(self) -> Kernels:
        """The kernels for arrays on the host: these, or a device's one object for all of an exchange's buckets."""
        return self

    def adopt_thread(self) -> None:  # noqa: B027
        """Prepare the calling thread, once, for the operations of an exchange."""

    def wait_for(self, event: int) -> None:  # noqa: B027
        """Let the device's next work wait for another stream's event, given by its handle."""

    def wait(self) -> None:  # noqa: B027
        """Wait until everything enqueued so far has run."""

    def describe(self) -> str:
        """Return a line for a log: which backend runs, and on how many threads."""
        return self.name

    @abc.abstractmethod
    def sums_of_squares(self, gradients: Sequence[Array]) -> np.ndarray:
        """Return (len,) float64: each gradient's sum of squares over its finite entries."""

    @abc.abstractmethod
    def begin_selection(
        self, work: Sequence[SegmentWork], u: Array, v: Array, thresholds: np.ndarray | None
    ) -> Callable[[], Selection]:
        """Let other threads begin :meth:`accumulate_and_select`; without thresholds, :meth:`accumulate`.

        If memory cannot be allocated, this method raises an error before u and v have changed.

        Returns:
            A function that finishes the work and returns what was selected. It must be called once, whatever happens,
            before the state is read. Until then, no argument may change.
        """

    def accumulate(self, work: Sequence[SegmentWork], u: Array, v: Array) -> bool:
        """Add gradients to u and v with momentum correction; return whether an entry was not finite.

        ``u <- m*u + G``; then ``v <- v + u``, with Nesterov ``v <- v + G + m*u``. With m = 0, u is neither read nor
        written and ``v <- v + G``. Source: arXiv 1712.01887, Algorithm 4; u is the velocity in both forms.
        """
        return self.begin_selection(work, u, v, None)().nonfinite

    def accumulate_and_select(
        self, work: Sequence[SegmentWork], u: Array, v: Array, thresholds: np.ndarray
    ) -> Selection:
        """Call :meth:`accumulate`; select each segment's k largest non-zero ``|v|``, or all if there are fewer.

        Among equal magnitudes, lower positions go first. ``thresholds``, (S, c), are read and updated.
        """
        return self.begin_selection(work, u, v, thresholds)()

    @abc.abstractmethod
    def take_out(self, u: Array, v: Array, positions: np.ndarray, decoded: np.ndarray, *, masking: bool) -> None:
        """Subtract ``decoded`` from v at the positions and, with masking, set u to 0 there."""

    @abc.abstractmethod
    def set_entries(
        self, results: Sequence[Array], offsets: np.ndarray, positions: np.ndarray, values: np.ndarray
    ) -> None:
        """Set results to the values at the positions, and to 0 elsewhere.

        Args:
            results: S arrays, (n,) each; they may be shorter than their parts of the bucket, which include padding.
            offsets: (S + 1,) int64; result s holds the positions from ``offsets[s]`` on.
            positions: (k,) int64, ascending and unique.
            values: (k,) float.

        Raises:
            WireError: a position lies in the padding.
        """

    @abc.abstractmethod
    def dense_update(
        self, result: Array, mean: np.ndarray, u: Array, parameter: Array | None, rule: MomentumRule
    ) -> None:
        """Apply momentum SGD to an averaged gradient, with the same result as the optimizer's own momentum."""

    # -- step-ahead error feedback: p, theta and a are (n,) float32, of any array library whose memory the kernels read

    # In these methods place is theta + share * a. Shares and factors are for each piece, or one for all; None is 1.

    def is_elsewhere(self, p: Array, theta: Array, a: Array, shares: Array | None) -> Any:
        """Return whether p is not the place, as a bool or as an array of one bool."""
        return (p != _place(theta, a, shares)).any()

    def take_update(
        self, p: Array, theta: Array, a: Array, shares: Array | None, factors: Array | None, decay: float
    ) -> None:
        """Replace p by ``s * (p - place) + (s - 1) * decay * theta``; s are the factors."""
        subtract(p, _place(theta, a, shares), theta, factors, decay)

    def put(self, p: Array, theta: Array, a: Array, shares: Array | None) -> None:
        """Write the place into p."""
        if shares is None:
            p[...] = theta  # without memory for a sum
            p += a
        else:
            p[...] = _place(theta, a, shares)

    # -- tensors that are sent dense: these methods work on the host and call ``dense_update`` -----------------------

    def begin_packing(self, parts: Sequence[SegmentWork], vector: np.ndarray) -> Callable[[], bool]:
        """Begin to copy gradients, times their scale, into a vector on the host, with zeros between them.

        Returns:
            A function that waits for the copies and returns whether a value is not finite.
        """

        def finish() -> bool:
            vector.fill(0)
            for p in parts:
                if p.scale == 1.0:
                    p.place[...] = p.gradient
                else:
                    np.multiply(p.gradient, vector.dtype.type(p.scale), out=p.place, dtype=vector.dtype)
            return not is_finite(vector)

        return finish

    def update(self, parts: Sequence[SegmentWork], vector: np.ndarray, u: Array | None = None) -> None:
        """Apply momentum SGD to means and write the results.

        ``vector`` holds the means; ``u`` is needed only for momentum. A part's offset is its place in both.
        """
        for run in _runs(parts):
            if len(run) == 1:
                self._update_part(run[0], run[0].result, vector, u)
                continue
            # Update small neighbours with the same options together: a call costs more than its work on a small part.
            start, stop = run[0].offset, run[-1].offset + run[-1].length
            merged = dataclasses.replace(run[0], length=stop - start)
            results = np.empty(merged.length, vector.dtype)
            if merged.weight_decay:
                merged.parameter = np.zeros(merged.length, vector.dtype)
                for p in run:
                    merged.parameter[p.offset - start :][: p.length] = p.parameter
            self._update_part(merged, results, vector, u)
            for p in run:
                first = p.offset - start
                p.result[...] = results[first : first + p.length]

    def exceeds(
        self, parts: Sequence[SegmentWork], vector: np.ndarray, u: Array, written: Sequence[SegmentWork]
    ) -> bool:
        """Return whether a result in ``written``, or one that :meth:`update` would write, is above its limit. Waits."""
        found = [(p.result, p.limit) for p in written]
        for p in parts:
            result, span = np.empty(p.length, vector.dtype), slice(p.offset, p.offset + p.length)
            self._update_part(dataclasses.replace(p, offset=0), result, vector[span], u[span].copy())
            found.append((result, p.limit))
        return any(result.size and not np.abs(result).max() <= limit for result, limit in found)

    def _update_part(self, part: SegmentWork, result: Array, vector: np.ndarray, u: Array | None) -> None:
        mean = vector[part.offset :][: part.length]
        momentum = mean if u is None else u[part.offset :][: part.length]
        rule = MomentumRule(part.momentum, part.nesterov, part.weight_decay, part.scale)
        self.dense_update(result, mean, momentum, part.parameter, rule)


def _runs(parts: Sequence[SegmentWork]) -> list[list[SegmentWork]]:
    """Group neighbours that are small and share their options; each larger part is a separate group."""
    runs: list[list[SegmentWork]] = []
    before = None
    for p in parts:
        options = (p.momentum, p.nesterov, p.weight_decay, p.scale) if p.length <= SMALL else None
        if options is None or options != before:
            runs.append([])
        runs[-1].append(p)
        before = options
    return runs
