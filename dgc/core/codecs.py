"""How the entries of a message become bytes: codecs of positions, codecs of values, and what puts them together.

``docs/wire-format.md`` is the specification. The codecs' numbers are part of it: never reuse or change one. Every block
is a multiple of 8 bytes long, so each part of a message that starts on an 8-byte boundary does too.

n = elements of the bucket's flat sparse space, k = entries of one message, a group = the entries of one tensor. Groups
keep layers of different magnitude apart; they cost nothing to mark, since the boundaries follow from the positions and
the layout, which a receiver has.
"""

from __future__ import annotations

import math
from enum import IntEnum, unique
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dgc.core.checks import require_unused
from dgc.core.layout import Bucket
from dgc.errors import ConfigError, WireError

BLOCK_ALIGNMENT = 8
"""Every block's length is a multiple of this, so that the block after it can be read as words."""

FREE_NUMBERS = range(128, 256)
"""Numbers in a message's header that this package never gives to a codec of its own."""

SPARSE_ID = 1
"""Compressor id of ``dgc`` in the header."""

_DAMAGED = "The message is damaged, or was written for another layout."


@unique
class IndexCodecId(IntEnum):
    """How a message writes its positions; 1 and 4 were codecs' and stay reserved."""

    NONE = 0
    """No positions: the compressor sends every element. There is no codec object for it."""
    UINT16 = 2
    ELIAS_FANO = 3


@unique
class ValueCodecId(IntEnum):
    """How a message writes its values; 3, 5 and 6 were codecs' and stay reserved."""

    NONE = 0
    """The compressor writes its payload itself. There is no codec object for it."""
    FLOAT32 = 1
    FLOAT16 = 2
    INT8 = 4
    INT2 = 7
    INT3 = 8


@runtime_checkable
class IndexCodec(Protocol):
    """Writes k sorted, unique positions below n as bytes and reads them back."""

    id: int
    """The codec's number in a header."""
    name: str
    """The codec's name in the option ``indices=``."""

    def max_bytes(self, n: int, k: int) -> int:
        """Bytes that suffice for k or fewer of n elements, wherever they are: a multiple of 8 that never falls with k.

        0 <= k <= n < 2**31.
        """
        ...

    def encode(self, positions: np.ndarray, n: int, out: np.ndarray) -> int:
        """Write (k,) int64 positions, strictly ascending in [0, n), at the start of ``out``.

        For unsorted positions a codec may write nonsense, which ``decode`` refuses, but never outside ``out``.

        Args:
            positions: the positions.
            n: elements of the bucket.
            out: (m,) uint8, contiguous, m >= ``max_bytes(n, k)``.

        Returns:
            Bytes written, at most ``max_bytes(n, k)``, a multiple of 8.

        Raises:
            WireError: ``out`` is too short, or the codec met positions that it cannot write.
        """
        ...

    def decode(self, data: np.ndarray, n: int, count: int) -> tuple[np.ndarray, int]:
        """Read ``count`` positions, 0..n, from the start of ``data``, (m,) uint8; what follows them is not looked at.

        Returns:
            (count,) int64, strictly ascending, each in [0, n); and the number of bytes read.

        Raises:
            WireError: ``data`` is too short, or does not hold ``count`` ascending positions below n.
        """
        ...


@runtime_checkable
class ValueCodec(Protocol):
    """Writes k float32 as bytes and reads them back, exactly or with an error that the sender can compute.

    Group i, one per tensor of the bucket, holds the entries ``bounds[i]:bounds[i + 1]``; bounds are (groups + 1,) int64
    from 0 to k. Groups may be empty. Finite values come back finite; a non-finite value makes its own entry non-finite,
    or its whole group where the group shares a scale. Neither raises.
    """

    id: int
    """The codec's number in a header."""
    name: str
    """The codec's name in the options ``values=`` and ``small=``."""

    def max_bytes(self, k: int, groups: int) -> int:
        """Bytes that always suffice for k or fewer entries in this many groups; a multiple of 8."""
        ...

    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:
        """Write (k,) float32, contiguous, at the start of ``out``, (m,) uint8, m >= ``max_bytes(k, groups)``.

        Returns:
            Bytes written, at most ``max_bytes(k, groups)``, a multiple of 8.

        Raises:
            WireError: ``out`` is too short.
        """
        ...

    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:
        """Read ``count`` values from the start of ``data``, (m,) uint8; what follows them is not looked at.

        Returns:
            (count,) float32, a fresh array; and the number of bytes read.

        Raises:
            WireError: ``data`` is too short or damaged.
        """
        ...


class _Compiled:
    """``dgc.core.kernels.loops``, which is loaded with Numba when one of its loops is first used."""

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
    """The first ``nbytes`` of what is left of a message, to be read, or written by the codec ``what``."""
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


class Uint16Indices:
    """16-bit offsets in tiles of 65 536 elements, after a table of the tiles' entry counts.

    16 bits an entry and 32 bits a tile: 16.5 bits at 0.1 %. As quick to read as it gets.
    """

    id: int = IndexCodecId.UINT16
    name = "uint16"

    def max_bytes(self, n: int, k: int) -> int:  # noqa: D102
        return padded(4 * _tiles_of(n)) + padded(2 * k)

    def encode(self, positions: np.ndarray, n: int, out: np.ndarray) -> int:
        """Write positions; does not check their order. See :class:`IndexCodec`."""
        k = positions.size
        block = block_of(out, self.max_bytes(n, k), self.name, writes=True)
        tiles = _tiles_of(n)
        table = padded(4 * tiles)
        low = block[table : table + 2 * k].view(np.uint16)
        loops.to_tiles(positions, block[: 4 * tiles].view(np.uint32), low)
        block[4 * tiles : table] = 0
        block[table + 2 * k :] = 0
        return block.size

    def decode(self, data: np.ndarray, n: int, count: int) -> tuple[np.ndarray, int]:  # noqa: D102
        block = block_of(data, self.max_bytes(n, count), self.name)
        tiles, table = _tiles_of(n), block.size - padded(2 * count)
        counts = block[: 4 * tiles].view("<u4").astype(np.int64)
        # Before np.repeat, which would otherwise allocate whatever a damaged table asks for.
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
    """Return the low bits' width and the words of both parts for k entries below n.

    The width, 0..47, is the smallest of those that make the block shortest; the length never falls when k grows.

    Source: Elias 1974, "Efficient storage and retrieval by content and address of static files"; Fano 1971.
    """
    if k == 0:
        return 0, 0, 0
    shapes = ((w, words_for(k * w), words_for(k + ((n - 1) >> w))) for w in range(max(n - 1, 1).bit_length()))
    return min(shapes, key=lambda shape: shape[1] + shape[2])


class EliasFanoIndices:
    """Near the entropy: 11.95 bits an entry at 0.1 % and 8.56 at 1 %, where 11.41 and 8.08 are possible.

    Low part: the low w bits of each position, one after the other. High part: a bit vector in which entry i with
    high part h sets bit h + i, so that h zeros and i ones stand before it. Golomb-Rice would reserve as many bits in
    the worst case, and its entries wait for one another.
    """

    id: int = IndexCodecId.ELIAS_FANO
    name = "elias_fano"

    def max_bytes(self, n: int, k: int) -> int:  # noqa: D102
        _, low_words, high_words = elias_fano_shape(n, k)
        return 8 * (low_words + high_words)

    def encode(self, positions: np.ndarray, n: int, out: np.ndarray) -> int:  # noqa: D102
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

    def decode(self, data: np.ndarray, n: int, count: int) -> tuple[np.ndarray, int]:  # noqa: D102
        block = block_of(data, self.max_bytes(n, count), self.name)
        words, positions = _as_words(block), np.empty(count, np.int64)
        width, low, _ = elias_fano_shape(n, count)
        found = loops.elias_fano_decode(words[:low], words[low:], n, width, positions)
        if found != count:
            raise WireError(
                f"{self.name}: {min(found, count)} of {count} positions are strictly ascending in 0..{n - 1}"
                f"{', and more follow' if found > count else ''}. {_DAMAGED}"
            )
        return positions, block.size


def _as_words(block: np.ndarray) -> np.ndarray:
    """A block of whole words as little-endian uint64; a copy where the memory is not aligned for that."""
    words = block.view("<u8")
    return words if words.flags.aligned else words.copy()


# -- values --------------------------------------------------------------------------------------------------------


class Float32Values:
    """32 bits an entry, exact."""

    id: int = ValueCodecId.FLOAT32
    name = "float32"

    def max_bytes(self, k: int, groups: int) -> int:  # noqa: D102
        return padded(4 * k)

    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:  # noqa: D102
        block = block_of(out, self.max_bytes(values.size, 0), self.name, writes=True)
        block[: values.nbytes] = values.view(np.uint8)
        block[values.nbytes :] = 0
        return block.size

    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:  # noqa: D102
        block = block_of(data, self.max_bytes(count, 0), self.name)
        return block[: 4 * count].view(np.float32).copy(), block.size


class Float16Values:
    """16 bits an entry: half precision, under one power of two for the whole message.

    Gradients are often below 6e-5, where half precision thins out. So the message's values are multiplied by the
    power of two that brings the largest to [2^14, 2^15): the relative error is at most 2^-11 for every value down to
    2^-28 of the largest one, and below that the absolute error is at most 2^-39 of the largest. Scaling by a power
    of two rounds nothing.

    A block: the exponent e as int32, 4 zero bytes, then k halves h; a value is h * 2^e.
    """

    id: int = ValueCodecId.FLOAT16
    name = "float16"

    HEAD = 8
    MIN_EXPONENT = -163
    """Brings the smallest float32, 2^-149, to 2^14."""
    MAX_EXPONENT = 113
    """Brings the largest float32, just below 2^128, to just below 2^15."""

    def max_bytes(self, k: int, groups: int) -> int:  # noqa: D102
        return self.HEAD + padded(2 * k)

    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:  # noqa: D102
        block = block_of(out, self.max_bytes(values.size, 0), self.name, writes=True)
        largest = float(np.uint32(loops.largest_magnitude(values)).view(np.float32))
        finite = math.isfinite(largest)
        # Beside NaN or infinity, which stay what they are, the finite entries keep what precision they can.
        exponent = (math.frexp(largest)[1] - 15 if largest else 0) if finite else self.MAX_EXPONENT
        # Rounding up to 2^15 would read back as 2^128: infinity.
        limit = 32752.0 if finite and exponent == self.MAX_EXPONENT else math.inf
        end = self.HEAD + 2 * values.size
        loops.to_halves(values, *_factors(-exponent), np.float32(limit), block[self.HEAD : end].view(np.uint16))
        block[:4].view(np.int32)[0] = exponent
        block[4:8] = 0
        block[end:] = 0
        return block.size

    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:  # noqa: D102
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
    """Normal float32 whose product is 2^exponent, -163..163: multiplying by one after the other rounds once at most."""
    first = exponent if -126 <= exponent <= 127 else int(math.copysign(100, exponent))
    return np.float32(2.0**first), np.float32(2.0 ** (exponent - first))


class _Quantized:
    """A code of ``bits`` bits for each entry and ``scales`` float32 for each group.

    A block: (groups, scales) float32, padded; then the codes, lowest bits first, padded.
    """

    name: str
    bits: int
    scales: int

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
    """Of ``bits`` bits: q in -L..L with L = 2^(bits - 1) - 1; a value is (q / L) * its group's largest magnitude.

    The error is at most 1 / 2L of the group's largest magnitude, and that largest value comes back exact. The factor
    q / L comes first and is at most 1, so nothing overflows, and nothing is divided by a scale that fell to 0.
    """

    scales = 1

    def __init__(self, bits: int) -> None:
        """8 bits: 255 levels. 3: 7, for small tensors, of which a few elements are large and most are sent as 0."""
        self.bits, self.name = bits, f"int{bits}"
        self.id: int = ValueCodecId[self.name.upper()]

    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:  # noqa: D102
        block = block_of(out, self.max_bytes(values.size, bounds.size - 1), self.name, writes=True)
        self.write_apart(values, bounds[:-1], bounds, block, np.empty_like(values))
        return block.size

    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:  # noqa: D102
        block, values = block_of(data, self.max_bytes(count, bounds.size - 1), self.name), np.zeros(count, np.float32)
        self.add_apart(block, bounds[:-1], bounds, values)
        return values, block.size

    def write_apart(
        self, x: np.ndarray, starts: np.ndarray, bounds: np.ndarray, block: np.ndarray, left: np.ndarray
    ) -> None:
        """Write groups that begin at ``starts`` of (N,) float32 ``x``; their places in ``left`` become what is lost."""
        scales, codes = np.empty(starts.size, np.float32), np.empty(int(bounds[-1]), np.uint8)
        loops.encode_integers(x, starts, bounds, self.bits, scales, codes, left)
        self._write(block, scales, codes)

    def add_apart(self, block: np.ndarray, starts: np.ndarray, bounds: np.ndarray, sums: np.ndarray) -> None:
        """Read such groups and add them to (N,) float32 ``sums``."""
        scales, codes = self._read(block, int(bounds[-1]), starts.size)
        if not loops.add_integers(scales, codes, starts, bounds, self.bits, sums):
            lowest = -(1 << (self.bits - 1))
            raise WireError(f"{self.name}: an entry is {lowest}, which it never writes. The message is damaged.")


class Int2Values(_Quantized):
    """2 bits an entry: 1 = negative, and 2 = the larger of its group's two magnitudes.

    The magnitudes are the mean of those not above the group's mean magnitude, and the mean of those above; so the sum
    of a group's magnitudes is kept exactly (in real numbers), and a single large entry stays as it is.
    """

    id: int = ValueCodecId.INT2
    name = "int2"
    bits = 2
    scales = 2

    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:  # noqa: D102
        block = block_of(out, self.max_bytes(values.size, bounds.size - 1), self.name, writes=True)
        means, codes = np.empty(2 * (bounds.size - 1), np.float32), np.empty(values.size, np.uint8)
        loops.encode_two_means(values, bounds, means, codes)
        self._write(block, means, codes)
        return block.size

    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:  # noqa: D102
        block = block_of(data, self.max_bytes(count, bounds.size - 1), self.name)
        means, codes = self._read(block, count, bounds.size - 1)
        values = np.empty(count, np.float32)
        loops.decode_two_means(means, codes, bounds, values)
        return values, block.size


# -- by name -------------------------------------------------------------------------------------------------------


def _by_name(*codecs: Any) -> dict[str, Any]:
    return {codec.name: codec for codec in codecs}


INDEX_CODECS: dict[str, IndexCodec] = _by_name(Uint16Indices(), EliasFanoIndices())
VALUE_CODECS: dict[str, ValueCodec] = _by_name(
    Float16Values(), Float32Values(), IntegerValues(8), IntegerValues(3), Int2Values()
)
_KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "indices": (IndexCodec, INDEX_CODECS),
    "values": (ValueCodec, VALUE_CODECS),
}


def register_codec(option: str, codec: IndexCodec | ValueCodec) -> None:
    """Add a codec, so that the option ``indices=`` or ``values=`` takes its name in every framework.

    Every rank must register the same ones.

    Args:
        option: "indices" for an :class:`IndexCodec`, "values" for a :class:`ValueCodec`.
        codec: every message is written and read by it, from several threads.

    Raises:
        ConfigError: another option, a member of the protocol is missing, or name or number are taken or not allowed.
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
    """Selected entries of one bucket at one density, through an index codec and a value codec."""

    def __init__(self, bucket: Bucket, k: int, indices: str, values: str) -> None:
        self._bucket = bucket
        n = bucket.sparse_size
        self.indices = INDEX_CODECS[indices]
        self.values = VALUE_CODECS[values]
        self.max_bytes = padded(self.indices.max_bytes(n, k) + self.values.max_bytes(k, len(bucket.sparse))) if k else 0
        """Payload bytes that hold any k entries."""

    def encode(self, positions: np.ndarray, values: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write the payload; returns the values as every receiver will decode them.

        Args:
            positions: (k,) int64, ascending, unique, below n.
            values: (k,) float32.
            out: (payload_bytes,) uint8; what is left over is zeroed.
        """
        bounds = self._bucket.bounds(positions)
        values_at = self.indices.encode(positions, self._bucket.sparse_size, out)
        out[values_at + self.values.encode(values, bounds, out[values_at:]) :] = 0
        return self.values.decode(out[values_at:], len(values), bounds)[0]

    def decode(self, payload: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Read a payload: (count,) int64 positions and (count,) values."""
        n = self._bucket.sparse_size
        if not 0 <= count <= n:
            raise WireError(f"the message claims {count} entries in a bucket of {n} elements. It is damaged.")
        positions, used = self.indices.decode(payload, n, count)
        values, _ = self.values.decode(payload[used:], count, self._bucket.bounds(positions))
        return positions, values


class SmallCodec:
    """The small dense tensors of one bucket through a value codec, each as a group; ``max_bytes`` is always used up.

    S = tensors, N = elements of the space that they lie in, padding between them included.
    """

    def __init__(self, bucket: Bucket, name: str) -> None:
        self.values = VALUE_CODECS[name]
        self.size = bucket.small_size
        segments = [s for s in bucket.small if s.length]
        self._starts = np.array([s.offset - bucket.sparse_size for s in segments], np.int64)
        self._bounds = np.cumsum([0, *(s.length for s in segments)], dtype=np.int64)
        self.max_bytes = self.values.max_bytes(int(self._bounds[-1]), len(segments))
        lengths = np.diff(self._bounds)
        # Where each element lies; the padding between tensors is not sent.
        self._places = np.repeat(self._starts - self._bounds[:-1], lengths) + np.arange(self._bounds[-1])

    def encode(self, x: np.ndarray, out: np.ndarray, left: np.ndarray) -> None:
        """Write the block of (N,) float32 ``x``, finite, 0 between tensors; ``left`` becomes ``x - decoded``."""
        left.fill(0)
        if isinstance(self.values, IntegerValues):
            self.values.write_apart(x, self._starts, self._bounds, out, left)
            return
        values = x[self._places]
        self.values.encode(values, self._bounds, out)
        left[self._places] = values - self.values.decode(out, values.size, self._bounds)[0]

    def add(self, data: np.ndarray, sums: np.ndarray) -> None:
        """Read a block and add it to ``sums``, (N,) float32."""
        with np.errstate(over="ignore", invalid="ignore"):
            if isinstance(self.values, IntegerValues):
                self.values.add_apart(data, self._starts, self._bounds, sums)
            else:
                sums[self._places] += self.values.decode(data, int(self._bounds[-1]), self._bounds)[0]
