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


class Int8Values:
    """8 bits an entry: q in -127..127, a value is (q / 127) * largest magnitude of its group.

    The error is at most 1/254 of the group's largest magnitude, and that largest value comes back exact. The factor
    q / 127 comes first and is at most 1, so nothing overflows, and nothing is divided by a scale that fell to 0.

    A block: (groups,) float32 largest magnitudes, padded; then (k,) int8, padded.
    """

    id = ValueCodecId.INT8
    name = "int8"
    dtype = np.dtype(np.float32)
    grouped = True

    def max_bytes(self, k: int, groups: int) -> int:  # noqa: D102
        return padded(4 * groups) + padded(k)

    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:  # noqa: D102
        from dgc.core.wire.codecs import numba_loops as loops

        check_values(values, self.dtype, self.name)
        groups = _group_sizes(bounds, values.size, self.name).size
        block = block_of(out, self.max_bytes(values.size, groups), self.name, writes=True)
        loops.encode_int8(values, bounds[:-1], bounds, block, np.empty_like(values))
        return block.size

    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:  # noqa: D102
        from dgc.core.wire.codecs import numba_loops as loops

        block = block_of(data, self.max_bytes(count, _group_sizes(bounds, count, self.name).size), self.name)
        values = np.zeros(count, np.float32)
        if not loops.add_int8(block, bounds[:-1], bounds, values):
            raise WireError(f"{self.name}: an entry is -128, the codec writes -127..127. The message is damaged.")
        return values, block.size


class _TwoMeans:
    """``bits`` bits an entry, of which the last chooses between two means of its group.

    A block: (groups, 2) float32 means; then the bits of each entry, lowest bits first, padded.
    """

    bits: int
    name: str
    dtype = np.dtype(np.float32)
    grouped = True

    def max_bytes(self, k: int, groups: int) -> int:
        return 8 * groups + 8 * words_for(self.bits * k)

    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:
        from dgc.core.wire.codecs import numba_loops as loops

        check_values(values, self.dtype, self.name)
        groups = _group_sizes(bounds, values.size, self.name).size
        block = block_of(out, self.max_bytes(values.size, groups), self.name, writes=True)
        loops.encode_two_means(values, bounds, self.bits, block[: 8 * groups].view(np.float32), block[8 * groups :])
        return block.size

    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:
        from dgc.core.wire.codecs import numba_loops as loops

        groups = _group_sizes(bounds, count, self.name).size
        block = block_of(data, self.max_bytes(count, groups), self.name)
        values = np.empty(count, np.float32)
        loops.decode_two_means(block[: 8 * groups].view(np.float32), block[8 * groups :], bounds, self.bits, values)
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
