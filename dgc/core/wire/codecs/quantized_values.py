"""Value codecs of a few bits an entry and a scale for each group of a message.

k = entries, a group = the entries of one tensor. Groups keep layers of different magnitude apart; they cost nothing
to mark, since the boundaries follow from the positions and the layout, which a receiver has.
"""

from __future__ import annotations

import numpy as np

from dgc.core.wire.codecs.base import ValueCodecId
from dgc.core.wire.codecs.blocks import block_of, padded, words_for
from dgc.core.wire.codecs.float_values import check_values
from dgc.errors import WireError


class _Quantized:
    """A code of ``bits`` bits for each entry and ``scales`` float32 for each group.

    A block: (groups, scales) float32, padded; then the codes, lowest bits first, padded.
    """

    bits: int
    scales: int
    name: str
    dtype = np.dtype(np.float32)
    grouped = True

    def max_bytes(self, k: int, groups: int) -> int:
        return padded(4 * self.scales * groups) + 8 * words_for(self.bits * k)

    def _write(self, block: np.ndarray, scales: np.ndarray, codes: np.ndarray) -> None:
        from dgc.core.wire.codecs import numba_packing as packing

        block[: scales.nbytes].view(np.float32)[:] = scales
        at = padded(scales.nbytes)
        block[scales.nbytes : at] = 0
        block[at:][-8:] = 0
        packing.pack(codes, self.bits, block[at:])

    def _read(self, block: np.ndarray, k: int, groups: int) -> tuple[np.ndarray, np.ndarray]:
        from dgc.core.wire.codecs import numba_packing as packing

        scales, codes = block[: 4 * self.scales * groups].view(np.float32), np.empty(k, np.uint8)
        packing.unpack(block[padded(scales.nbytes) :], self.bits, codes)
        return scales, codes

    def _block(self, data: np.ndarray, k: int, bounds: np.ndarray, *, writes: bool = False) -> np.ndarray:
        groups = _group_sizes(bounds, k, self.name).size
        return block_of(data, self.max_bytes(k, groups), self.name, writes=writes)


class IntegerValues(_Quantized):
    """Of ``bits`` bits: q in -L..L with L = 2^(bits - 1) - 1; a value is (q / L) * its group's largest magnitude.

    The error is at most 1 / 2L of the group's largest magnitude, and that largest value comes back exact. The factor
    q / L comes first and is at most 1, so nothing overflows, and nothing is divided by a scale that fell to 0.
    """

    scales = 1

    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:  # noqa: D102
        check_values(values, self.dtype, self.name)
        block = self._block(out, values.size, bounds, writes=True)
        self.write_apart(values, bounds[:-1], bounds, block, np.empty_like(values))
        return block.size

    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:  # noqa: D102
        block, values = self._block(data, count, bounds), np.zeros(count, np.float32)
        self.add_apart(block, bounds[:-1], bounds, values)
        return values, block.size

    def write_apart(
        self, x: np.ndarray, starts: np.ndarray, bounds: np.ndarray, block: np.ndarray, left: np.ndarray
    ) -> None:
        """Write groups that begin at ``starts`` of (N,) float32 ``x``; their places in ``left`` become what is lost."""
        from dgc.core.wire.codecs import numba_loops as loops

        scales, codes = np.empty(starts.size, np.float32), np.empty(int(bounds[-1]), np.uint8)
        loops.encode_integers(x, starts, bounds, self.bits, scales, codes, left)
        self._write(block, scales, codes)

    def add_apart(self, block: np.ndarray, starts: np.ndarray, bounds: np.ndarray, sums: np.ndarray) -> None:
        """Read such groups and add them to (N,) float32 ``sums``.

        Raises:
            WireError: the block is damaged; nothing was added.
        """
        from dgc.core.wire.codecs import numba_loops as loops

        scales, codes = self._read(block, int(bounds[-1]), starts.size)
        if not loops.add_integers(scales, codes, starts, bounds, self.bits, sums):
            lowest = -(1 << (self.bits - 1))
            raise WireError(f"{self.name}: an entry is {lowest}, which it never writes. The message is damaged.")


class Int8Values(IntegerValues):
    """8 bits an entry, 255 levels."""

    id = ValueCodecId.INT8
    name = "int8"
    bits = 8


class Int3Values(IntegerValues):
    """3 bits an entry, 7 levels: for small tensors, of which a few elements are large and most are sent as 0."""

    id = ValueCodecId.INT3
    name = "int3"
    bits = 3


class _TwoMeans(_Quantized):
    """The last bit chooses between two means of its group."""

    scales = 2

    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:
        from dgc.core.wire.codecs import numba_loops as loops

        check_values(values, self.dtype, self.name)
        block = self._block(out, values.size, bounds, writes=True)
        means, codes = np.empty(2 * (bounds.size - 1), np.float32), np.empty(values.size, np.uint8)
        loops.encode_two_means(values, bounds, self.bits, means, codes)
        self._write(block, means, codes)
        return block.size

    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:
        from dgc.core.wire.codecs import numba_loops as loops

        block, values = self._block(data, count, bounds), np.empty(count, np.float32)
        means, codes = self._read(block, count, bounds.size - 1)
        loops.decode_two_means(means, codes, bounds, self.bits, values)
        return values, block.size


class Int2Values(_TwoMeans):
    """2 bits an entry: 1 = negative, and 2 = the larger of its group's two magnitudes.

    The magnitudes are the mean of those not above the group's mean magnitude, and the mean of those above; so the sum
    of a group's magnitudes is kept exactly (in real numbers), and a single large entry stays as it is.
    """

    id = ValueCodecId.INT2
    name = "int2"
    bits = 2


class SignValues(_TwoMeans):
    """1 bit an entry, 1 = negative: each value becomes the mean of its group's values of the same sign.

    What a class of values loses, the residual keeps, and the sum over each class is kept exactly (in real numbers).
    Zeros count as positive. The first mean is that of the non-negative values.

    Source: Seide et al. 2014, "1-bit stochastic gradient descent"; Dryden et al. 2016, two means of sent entries.
    """

    id = ValueCodecId.SIGN
    name = "sign"
    bits = 1


def _group_sizes(bounds: np.ndarray, k: int, name: str) -> np.ndarray:
    """Return (groups,) sizes of the groups.

    Raises:
        WireError: bounds do not run from 0 to k without a step back.
    """
    sizes = np.diff(bounds)
    if bounds.size < 1 or bounds[0] != 0 or bounds[-1] != k or (sizes.size and int(sizes.min()) < 0):
        raise WireError(
            f"{name}: the bounds of the groups must run from 0 to {k} entries without a step back. They follow from "
            "the layout's segments, np.searchsorted(positions, segment_offsets)."
        )
    return sizes
