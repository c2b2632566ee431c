"""Turn the entries of a message into bytes and back: codecs of positions, codecs of values, and their combinations.

``docs/wire-format.md`` is the specification. It contains the codecs' numbers: never reuse or change one. The length of
every block is a multiple of 8 bytes, so that each block of a message begins on an 8-byte boundary.

n = elements of the bucket's sparsified part, k = entries of one message, a group = the entries of one tensor. Each
group has its own scale, because layers differ in magnitude. Groups need no bytes: the receiver computes their bounds
from the positions and the layout.
"""

from __future__ import annotations

import math
from enum import IntEnum, unique
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
from typing_extensions import override

from dgc.core.checks import require_unused
from dgc.core.layout import Bucket
from dgc.core.stripes import Stripes
from dgc.errors import ConfigError, WireError

BLOCK_ALIGNMENT = 8  # bytes; the length of every block is a multiple of this

# Numbers for compressors and codecs that do not belong to this package.
FREE_NUMBERS = range(128, 256)

SPARSE_ID = 1  # the number of ``dgc`` in the header

_DAMAGED = "The message is damaged, or was written for another layout."


@unique
class IndexCodecId(IntEnum):
    """The codec of a message's positions. 1 and 4 are reserved."""

    NONE = 0  # the compressor sends every element, or writes positions itself
    UINT16 = 2
    ELIAS_FANO = 3


@unique
class ValueCodecId(IntEnum):
    """The codec of a message's values. 3, 5 and 6 are reserved."""

    NONE = 0  # the compressor writes its payload itself
    FLOAT32 = 1
    FLOAT16 = 2
    INT8 = 4
    INT2 = 7
    INT3 = 8
    INT4 = 9


@runtime_checkable
class IndexCodec(Protocol):
    """Write k ascending, unique positions below n as bytes, and read them back."""

    id: int  # the codec's number in a header
    name: str  # the codec's name in the option ``indices=``

    def max_bytes(self, n: int, k: int) -> int:
        """Return the most bytes that k or fewer positions take; 0 <= k <= n < 2**31.

        The result is a multiple of 8, and does not fall as k grows.
        """

    def encode(self, positions: np.ndarray, n: int, out: np.ndarray) -> int:
        """Write (k,) int64 positions, strictly ascending in [0, n), at the start of ``out``.

        If positions are not ascending, the codec may write bytes that ``decode`` refuses, but only inside ``out``.

        Args:
            positions: the positions.
            n: elements of the bucket.
            out: (m,) uint8, contiguous, m >= ``max_bytes(n, k)``.

        Returns:
            Bytes written, at most ``max_bytes(n, k)``, a multiple of 8.

        Raises:
            WireError: ``out`` is too short, or the codec cannot write these positions.
        """

    def decode(self, data: np.ndarray, n: int, count: int) -> tuple[np.ndarray, int]:
        """Read ``count`` positions, 0 <= count <= n, from the start of ``data``, (m,) uint8; ignore the rest.

        Returns:
            (count,) int64, strictly ascending, each in [0, n); and the number of bytes read.

        Raises:
            WireError: ``data`` is too short, or does not hold ``count`` ascending positions below n.
        """


@runtime_checkable
class ValueCodec(Protocol):
    """Write k float32 as bytes, and read them back, exactly or with an error that the sender can compute.

    Each tensor of the bucket has a group of entries: ``bounds[i]:bounds[i + 1]``, with bounds (groups + 1,) int64 from
    0 to k. Groups may be empty. Finite values are read back as finite values. A value that is not finite raises no
    error: it is read back as a value that is not finite. The other values of its group may become not finite, too.
    """

    id: int  # the codec's number in a header
    name: str  # the codec's name in the options ``values=`` and ``small=``

    def max_bytes(self, k: int, groups: int) -> int:
        """Return the most bytes that k or fewer entries in this many groups take: a multiple of 8."""

    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:
        """Write (k,) float32, contiguous, at the start of ``out``, (m,) uint8, m >= ``max_bytes(k, groups)``.

        Returns:
            Bytes written, at most ``max_bytes(k, groups)``, a multiple of 8.

        Raises:
            WireError: ``out`` is too short.
        """

    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:
        """Read ``count`` values from the start of ``data``, (m,) uint8; ignore the rest.

        Returns:
            (count,) float32, a new array; and the number of bytes read.

        Raises:
            WireError: ``data`` is too short or damaged.
        """


class _Compiled:
    """Load ``dgc.core.kernels.loops``, and Numba with it, when one of its loops is first used."""

    def __getattr__(self, name: str) -> Any:
        from dgc.core.kernels import loops as loaded

        vars(self)[name] = loop = getattr(loaded, name)
        return loop


loops: Any = _Compiled()

# -- blocks --------------------------------------------------------------------------------------------------------


def padded(nbytes: int) -> int:
    """Return the smallest multiple of 8 that is at least ``nbytes``."""
    return (nbytes + BLOCK_ALIGNMENT - 1) // BLOCK_ALIGNMENT * BLOCK_ALIGNMENT


def words_for(bits: int) -> int:
    """Return how many 64-bit words hold this many bits."""
    return (bits + 63) // 64


def block_of(array: np.ndarray, nbytes: int, what: str, *, writes: bool = False) -> np.ndarray:
    """Return the first ``nbytes`` of ``array``, for the codec ``what`` to read or write; raise if it is too short."""
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
        raise WireError(
            f"{what}: a message is a contiguous one-dimensional uint8 array, not {array.dtype} of shape {array.shape}."
        )
    if array.size < nbytes:
        left = "{} left for it. Size the message with max_bytes()."
        if not writes:
            left = "only {} left. It was cut short, or its header does not belong to it."
        raise WireError(f"{what}: the block takes {nbytes} bytes, the message has {left.format(array.size)}")
    return array[:nbytes]


def check_positions(positions: np.ndarray, n: int, name: str) -> None:
    """Refuse positions that are not strictly ascending in [0, n)."""
    if positions.size == 0:
        return
    first, last = int(positions[0]), int(positions[-1])
    if first < 0 or last >= n:
        raise WireError(f"{name}: positions run from {first} to {last}, the bucket from 0 to {n - 1}. {_DAMAGED}")
    if not bool((positions[1:] > positions[:-1]).all()):
        raise WireError(f"{name}: positions are not strictly ascending. {_DAMAGED}")


# -- positions -----------------------------------------------------------------------------------------------------


class Uint16Indices(IndexCodec):
    """Write 16-bit offsets in tiles of 65 536 elements, after a table of the tiles' entry counts.

    An entry takes 16 bits and a tile 32 bits: 16.5 bits per entry at 0.1 %. No other codec is read faster.
    """

    id: int = IndexCodecId.UINT16
    name = "uint16"

    @override
    def max_bytes(self, n: int, k: int) -> int:
        return padded(4 * _tiles_of(n)) + padded(2 * k)

    @override
    def encode(self, positions: np.ndarray, n: int, out: np.ndarray) -> int:
        k = positions.size
        block = block_of(out, self.max_bytes(n, k), self.name, writes=True)
        tiles = _tiles_of(n)
        table = padded(4 * tiles)
        low = block[table : table + 2 * k].view(np.uint16)
        loops.to_tiles(positions, block[: 4 * tiles].view(np.uint32), low)
        block[4 * tiles : table] = 0
        block[table + 2 * k :] = 0
        return block.size

    @override
    def decode(self, data: np.ndarray, n: int, count: int) -> tuple[np.ndarray, int]:
        block = block_of(data, self.max_bytes(n, count), self.name)
        tiles, table = _tiles_of(n), block.size - padded(2 * count)
        counts = block[: 4 * tiles].view("<u4").astype(np.int64)
        # Check this before np.repeat allocates memory: a damaged table may hold any number.
        total = int(counts.sum())
        if total != count:
            raise WireError(f"{self.name}: the tiles hold {total} entries, the header says {count}. {_DAMAGED}")
        positions = np.repeat(np.arange(tiles, dtype=np.int64) << 16, counts)
        positions += block[table : table + 2 * count].view("<u2")
        check_positions(positions, n, self.name)
        return positions, block.size


def _tiles_of(n: int) -> int:
    return (n + 0xFFFF) >> 16


@lru_cache(maxsize=1024)
def elias_fano_shape(n: int, k: int) -> tuple[int, int, int]:
    """Return, for k entries below n, the width of the low bits and the numbers of words of the low and the high part.

    If several widths give the shortest block, the smallest of them is chosen. The length never falls when k grows.

    Source: Elias 1974, "Efficient storage and retrieval by content and address of static files"; Fano 1971.
    """
    if k == 0:
        return 0, 0, 0
    shapes = ((w, words_for(k * w), words_for(k + ((n - 1) >> w))) for w in range(max(n - 1, 1).bit_length()))
    return min(shapes, key=lambda shape: shape[1] + shape[2])


class EliasFanoIndices(IndexCodec):
    """Write positions in few bits: 11.95 per entry at 0.1 % and 8.56 at 1 %, where the entropy is 11.41 and 8.08.

    Low part: the low w bits of each position, one after the other. High part: a bit vector in which entry i with
    high part h sets bit h + i, so that h zeros and i ones precede this bit. A Golomb-Rice code is not shorter in the
    worst case, and its entries must be read one by one.
    """

    id: int = IndexCodecId.ELIAS_FANO
    name = "elias_fano"

    @override
    def max_bytes(self, n: int, k: int) -> int:
        _, low_words, high_words = elias_fano_shape(n, k)
        return 8 * (low_words + high_words)

    @override
    def encode(self, positions: np.ndarray, n: int, out: np.ndarray) -> int:
        block = block_of(out, self.max_bytes(n, positions.size), self.name, writes=True)
        words = _as_words(block)
        width, low, _ = elias_fano_shape(n, positions.size)
        written = loops.elias_fano_encode(positions, n, width, words[:low], words[low:])
        if written != positions.size:
            raise WireError(
                f"{self.name}: entry {written} of {positions.size} is {positions[written]}: positions must be strictly "
                f"ascending in 0..{n - 1}. The selection that made them is wrong."
            )
        if not np.may_share_memory(words, block):  # the block was not aligned, so the words are a copy
            block.view("<u8")[...] = words
        return block.size

    @override
    def decode(self, data: np.ndarray, n: int, count: int) -> tuple[np.ndarray, int]:
        block = block_of(data, self.max_bytes(n, count), self.name)
        words, positions = _as_words(block), np.empty(count, np.int64)
        width, low, _ = elias_fano_shape(n, count)
        found = loops.elias_fano_decode(words[:low], words[low:], n, width, positions)
        if found != count:
            problem = f"only the first {found} of {count} positions are strictly ascending in 0..{n - 1}"
            if found > count:
                problem = f"the block holds more than {count} positions"
            raise WireError(f"{self.name}: {problem}. {_DAMAGED}")
        return positions, block.size


def _as_words(block: np.ndarray) -> np.ndarray:
    """Return a block as little-endian uint64: a view, or a copy if the memory is not aligned."""
    words = block.view("<u8")
    return words if words.flags.aligned else words.copy()


# -- values --------------------------------------------------------------------------------------------------------


class Float32Values(ValueCodec):
    """Write each entry as a float32, exactly."""

    id: int = ValueCodecId.FLOAT32
    name = "float32"

    @override
    def max_bytes(self, k: int, groups: int) -> int:
        return padded(4 * k)

    @override
    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:
        block = block_of(out, self.max_bytes(values.size, 0), self.name, writes=True)
        block[: values.nbytes] = values.view(np.uint8)
        block[values.nbytes :] = 0
        return block.size

    @override
    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:
        block = block_of(data, self.max_bytes(count, 0), self.name)
        return block[: 4 * count].view(np.float32).copy(), block.size


class Float16Values(ValueCodec):
    """Write each entry in half precision. All entries of a message are scaled by one power of two.

    Gradients are often below 6e-5, where half precision has few digits. So all values are multiplied by the power of
    two that moves the largest one into [2^14, 2^15). Let M be the largest magnitude. The relative error is at most
    2^-11 for magnitudes of at least 2^-28 M; for smaller ones, the absolute error is at most 2^-39 M. The
    multiplication itself is exact.

    A block: the exponent e as int32, 4 zero bytes, then k halves h; a value is h * 2^e.
    """

    id: int = ValueCodecId.FLOAT16
    name = "float16"

    HEAD = 8
    MIN_EXPONENT = -163  # brings the smallest float32, 2^-149, to 2^14
    MAX_EXPONENT = 113  # brings the largest float32, just below 2^128, to just below 2^15

    @override
    def max_bytes(self, k: int, groups: int) -> int:
        return self.HEAD + padded(2 * k)

    @override
    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:
        block = block_of(out, self.max_bytes(values.size, 0), self.name, writes=True)
        largest = float(np.uint32(loops.largest_magnitude(values)).view(np.float32))
        finite = math.isfinite(largest)
        # NaN and infinity stay as they are. If there are any, use the largest exponent.
        exponent = (math.frexp(largest)[1] - 15 if largest else 0) if finite else self.MAX_EXPONENT
        # A half that is rounded up to 2^15 would be read as 2^128, which is infinity.
        limit = 32752.0 if finite and exponent == self.MAX_EXPONENT else math.inf
        end = self.HEAD + 2 * values.size
        loops.to_halves(values, *_factors(-exponent), np.float32(limit), block[self.HEAD : end].view(np.uint16))
        block[:4].view(np.int32)[0] = exponent
        block[4:8] = 0
        block[end:] = 0
        return block.size

    @override
    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:
        block = block_of(data, self.max_bytes(count, 0), self.name)
        exponent = int(block[:4].view("<i4")[0])
        if not self.MIN_EXPONENT <= exponent <= self.MAX_EXPONENT:
            raise WireError(
                f"{self.name}: the scale's exponent is {exponent}, it must be in {self.MIN_EXPONENT}.."
                f"{self.MAX_EXPONENT}. The message is damaged."
            )
        values = np.empty(count, np.float32)
        loops.from_halves(block[self.HEAD : self.HEAD + 2 * count].view(np.uint16), *_factors(exponent), values)
        return values, block.size


def _factors(exponent: int) -> tuple[np.float32, np.float32]:
    """Return two normal float32 numbers whose product is 2^exponent, for an exponent from -163 to 163.

    A number that is multiplied by both is rounded at most once.
    """
    first = exponent if -126 <= exponent <= 127 else int(math.copysign(100, exponent))
    return np.float32(2.0**first), np.float32(2.0 ** (exponent - first))


class _Quantized(ValueCodec):
    """Write ``scales`` float32 for each group, then ``bits`` bits for each entry, lowest first. Both are padded."""

    bits: int
    scales: int

    @override
    def max_bytes(self, k: int, groups: int) -> int:
        return padded(4 * self.scales * groups) + 8 * words_for(self.bits * k)

    def _write(self, block: np.ndarray, scales: np.ndarray, codes: np.ndarray) -> None:
        block[: scales.nbytes].view(np.float32)[:] = scales
        at = padded(scales.nbytes)
        block[scales.nbytes : at] = 0
        block[at:][-8:] = 0
        loops.packing[self.bits][0](codes, block[at:])

    def _read(self, block: np.ndarray, k: int, groups: int) -> tuple[np.ndarray, np.ndarray]:
        scales, codes = block[: 4 * self.scales * groups].view(np.float32), np.empty(k, np.uint8)
        loops.packing[self.bits][1](block[padded(scales.nbytes) :], codes)
        return scales, codes


class IntegerValues(_Quantized):
    """Write each entry as an integer q in -L..L with L = 2^(bits - 1) - 1.

    The value is q / L times its group's largest magnitude. The error is at most 1 / 2L of this magnitude, and the
    largest value itself is exact. q / L is computed first and is at most 1, so nothing overflows, and nothing is
    divided by a scale that was rounded to 0.
    """

    scales = 1

    def __init__(self, bits: int) -> None:
        """Use 8 bits (255 levels) or 3 bits (7 levels: most elements of a small tensor become 0)."""
        self.bits, self.name = bits, f"int{bits}"
        self.id: int = ValueCodecId[self.name.upper()]

    @override
    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:
        block = block_of(out, self.max_bytes(values.size, bounds.size - 1), self.name, writes=True)
        self.write_groups(values, bounds[:-1], bounds, block, np.empty_like(values))
        return block.size

    @override
    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:
        block, values = block_of(data, self.max_bytes(count, bounds.size - 1), self.name), np.zeros(count, np.float32)
        self.add_groups(block, bounds[:-1], bounds, values)
        return values, block.size

    def write_groups(
        self, x: np.ndarray, starts: np.ndarray, bounds: np.ndarray, block: np.ndarray, left: np.ndarray
    ) -> None:
        """Write the groups of (N,) float32 ``x`` that begin at ``starts``; set ``left`` to ``x - decoded`` there."""
        scales, codes = np.empty(starts.size, np.float32), np.empty(int(bounds[-1]), np.uint8)
        loops.encode_integers(x, starts, bounds, self.bits, scales, codes, left)
        self._write(block, scales, codes)

    def add_groups(self, block: np.ndarray, starts: np.ndarray, bounds: np.ndarray, sums: np.ndarray) -> None:
        """Read what :meth:`write_groups` wrote and add it to (N,) float32 ``sums``."""
        scales, codes = self._read(block, int(bounds[-1]), starts.size)
        if not loops.add_integers(scales, codes, starts, bounds, self.bits, sums):
            lowest = -(1 << (self.bits - 1))
            raise WireError(f"{self.name}: an entry is {lowest}, which no sender writes. The message is damaged.")


class MeanValues(_Quantized):
    """Write each entry as its sign and the number of one of its group's mean magnitudes.

    With 2 bits, the group's magnitudes are split at their mean. With 4 bits, each part is split twice more, at its own
    mean, which makes 8 parts. An entry is decoded as its part's mean. So, in exact arithmetic, the sum of a group's
    magnitudes is preserved, and so is a single large entry.
    """

    def __init__(self, bits: int) -> None:
        """Use 2 bits (two magnitudes in a group) or 4 bits (eight)."""
        self.bits, self.scales, self.name = bits, 1 << (bits - 1), f"int{bits}"
        self.id: int = ValueCodecId[self.name.upper()]

    @override
    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:
        block = block_of(out, self.max_bytes(values.size, bounds.size - 1), self.name, writes=True)
        means, codes = np.empty(self.scales * (bounds.size - 1), np.float32), np.empty(values.size, np.uint8)
        loops.encode_means(values, bounds, self.bits, means, codes)
        self._write(block, means, codes)
        return block.size

    @override
    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:
        block = block_of(data, self.max_bytes(count, bounds.size - 1), self.name)
        means, codes = self._read(block, count, bounds.size - 1)
        values = np.empty(count, np.float32)
        loops.decode_means(means, codes, bounds, self.bits, values)
        return values, block.size


# -- by name -------------------------------------------------------------------------------------------------------


_INDEX_CODECS: list[IndexCodec] = [Uint16Indices(), EliasFanoIndices()]
_VALUE_CODECS: list[ValueCodec] = [
    Float16Values(), Float32Values(), IntegerValues(8), MeanValues(4), IntegerValues(3), MeanValues(2)
]  # fmt: skip
INDEX_CODECS = {codec.name: codec for codec in _INDEX_CODECS}
VALUE_CODECS = {codec.name: codec for codec in _VALUE_CODECS}
_KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "indices": (IndexCodec, INDEX_CODECS),
    "values": (ValueCodec, VALUE_CODECS),
}


def register_codec(option: str, codec: IndexCodec | ValueCodec) -> None:
    """Add a codec, so that the option ``indices=`` or ``values=`` accepts its name. Call it on every rank.

    Args:
        option: "indices" for an :class:`IndexCodec`, "values" for a :class:`ValueCodec`.
        codec: the codec. Several threads may call it at the same time.

    Raises:
        ConfigError: ``option`` is neither of these, the codec lacks a member, or its name or number is taken or not
            allowed.
    """
    if option not in _KINDS:
        raise ConfigError(f"there are no codecs for the option {option!r}; choose one of {', '.join(_KINDS)}")
    protocol, table = _KINDS[option]
    members = [name for name in (*protocol.__annotations__, *vars(protocol)) if not name.startswith("_")]
    missing = [name for name in members if not hasattr(codec, name)]
    if missing:
        raise ConfigError(f"{codec!r} is no {protocol.__name__}: it lacks {', '.join(missing)}")
    taken = {other.name: int(other.id) for other in table.values()}
    require_unused("codec", codec.name, codec.id, numbers=FREE_NUMBERS, reserved=(), taken=taken)
    table[codec.name] = codec


# -- a bucket's blocks ---------------------------------------------------------------------------------------------


class SparseCodec:
    """Write and read the selected entries of one bucket at one density, with an index codec and a value codec.

    Attributes:
        max_bytes: bytes of the payload, enough for any k entries.
    """

    def __init__(self, bucket: Bucket | Stripes, k: int, indices: str, values: str) -> None:
        self._bucket = bucket
        n = bucket.sparse_size
        self.indices = INDEX_CODECS[indices]
        self.values = VALUE_CODECS[values]
        self.max_bytes = padded(self.indices.max_bytes(n, k) + self.values.max_bytes(k, len(bucket.sparse))) if k else 0

    def encode(self, positions: np.ndarray, values: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write the payload; return the values as every receiver decodes them.

        Args:
            positions: (k,) int64, ascending, unique, below n.
            values: (k,) float32.
            out: (max_bytes,) uint8; unused bytes become 0.
        """
        bounds = self._bucket.bounds(positions)
        values_at = self.indices.encode(positions, self._bucket.sparse_size, out)
        out[values_at + self.values.encode(values, bounds, out[values_at:]) :] = 0
        return self.values.decode(out[values_at:], len(values), bounds)[0]

    def decode(self, payload: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (count,) int64 positions and (count,) values of a payload."""
        n = self._bucket.sparse_size
        if not 0 <= count <= n:
            raise WireError(f"the message claims {count} entries in a bucket of {n} elements. It is damaged.")
        positions, used = self.indices.decode(payload, n, count)
        values, _ = self.values.decode(payload[used:], count, self._bucket.bounds(positions))
        return positions, values


class SmallCodec:
    """Write and read the small dense tensors of one bucket, or a span of them, with a value codec.

    Each tensor is a group.

    N = elements of these tensors' part of the bucket. N includes the padding between the tensors, which is not sent. A
    block always takes ``max_bytes``.
    """

    def __init__(self, bucket: Bucket, name: str, span: slice | None = None) -> None:
        """Encode the elements in ``span``, a slice of the N elements, or all of them if it is None."""
        self.values = VALUE_CODECS[name]
        self.size = bucket.small_size
        self._span = span = span or slice(0, self.size)
        ends = [(s.offset - bucket.sparse_size, s.slice.stop - bucket.sparse_size) for s in bucket.small]
        groups = [(max(a, span.start), min(b, span.stop)) for a, b in ends]
        groups = [(a, b) for a, b in groups if a < b]
        self._starts = np.array([a for a, _ in groups], np.int64)
        self._bounds = np.cumsum([0, *(b - a for a, b in groups)], dtype=np.int64)
        self.max_bytes = self.values.max_bytes(int(self._bounds[-1]), len(groups)) if groups else 0
        lengths = np.diff(self._bounds)
        # The index of each encoded element among the N elements.
        self._places = np.repeat(self._starts - self._bounds[:-1], lengths) + np.arange(self._bounds[-1])

    def encode(self, x: np.ndarray, out: np.ndarray, left: np.ndarray) -> None:
        """Write a block for (N,) float32 ``x``, which is finite and 0 in the padding; set ``left`` to ``x - decoded``.

        Elements of ``left`` outside the span stay as they are.
        """
        left[self._span] = 0
        if not self.max_bytes:
            return
        if isinstance(self.values, IntegerValues):
            self.values.write_groups(x, self._starts, self._bounds, out, left)
            return
        values = x[self._places]
        self.values.encode(values, self._bounds, out)
        left[self._places] = values - self.values.decode(out, values.size, self._bounds)[0]

    def add(self, data: np.ndarray, sums: np.ndarray) -> None:
        """Read a block and add it to ``sums``, (N,) float32."""
        if not self.max_bytes:
            return
        with np.errstate(over="ignore", invalid="ignore"):
            if isinstance(self.values, IntegerValues):
                self.values.add_groups(data, self._starts, self._bounds, sums)
            else:
                sums[self._places] += self.values.decode(data, int(self._bounds[-1]), self._bounds)[0]
