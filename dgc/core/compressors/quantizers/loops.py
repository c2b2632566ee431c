"""What the loops of size n of the quantising compressors do; they are in Numba, which is loaded on first use.

Letters: n elements. *codes* are (n,) uint8 small numbers, one for each element, before they are packed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np

from dgc.errors import ConfigError


class Loops(Protocol):
    """What each loop does. None reads or writes outside the arrays it is given."""

    def uniform(self, key: np.uint64, out: np.ndarray) -> None:
        """Fill (n,) float64 with random numbers in [0, 1); number i depends on the 64-bit key and on i alone."""
        ...

    def pack(self, codes: np.ndarray, bits: int, out: np.ndarray) -> None:
        """Write the low ``bits`` bits (1 to 8) of each code as one string, lowest first, into ceil(n*bits/8) bytes."""
        ...

    def unpack(self, data: np.ndarray, bits: int, codes: np.ndarray) -> None:
        """Undo :meth:`pack`."""
        ...

    def pack_trits(self, codes: np.ndarray, out: np.ndarray) -> None:
        """Write codes of 0, 1 and 2, five to a byte as a number to the base 3, into ceil(n/5) bytes."""
        ...

    def unpack_trits(self, data: np.ndarray, codes: np.ndarray) -> bool:
        """Undo :meth:`pack_trits`; returns False where a byte is above 242, which none can be."""
        ...

    def norms(self, x: np.ndarray, group: int, squared: bool, out: np.ndarray) -> None:
        """Each group's largest magnitude, or with ``squared`` its L2 norm if larger: (ceil(n/group),) float64."""
        ...

    def moments(self, x: np.ndarray, out: np.ndarray) -> None:
        """Of each tile of (n,) finite floats the largest magnitude, the sum, and the squares' sum about the mean.

        Args:
            x: the floats.
            out: (tiles, 3) float64, written; see :func:`~dgc.core.compressors.quantizers.codes.spread`.
        """
        ...

    def round_signed(
        self,
        x: np.ndarray,
        scales: np.ndarray,
        group: int,
        limit: float,
        levels: int,
        key: np.uint64,
        codes: np.ndarray,
    ) -> None:
        """Round ``sign(x) * min(|x|, limit) / scale * levels`` at random to a neighbouring integer, without bias.

        Args:
            x: (n,) finite floats.
            scales: (ceil(n / group),) float32, of each ``group`` elements; where it is 0 all become 0.
            group: elements that share a scale.
            limit: magnitudes are cut there.
            levels: the largest integer; the code is the rounded number plus ``levels``.
            key: of the random numbers.
            codes: written.
        """
        ...

    def scale_signed(self, codes: np.ndarray, scales: np.ndarray, group: int, levels: int, out: np.ndarray) -> bool:
        """Turn codes of :meth:`round_signed` into (n,) float32; returns False where a code is above ``2 * levels``."""
        ...

    def round_span(self, x: np.ndarray, scale: float, levels: int, key: np.uint64, codes: np.ndarray) -> None:
        """Round ``(x / (2 scale) + 1/2) * levels`` at random to a neighbouring integer of 0 to ``levels``."""
        ...

    def scale_span(self, codes: np.ndarray, scale: np.float32, levels: int, out: np.ndarray) -> None:
        """Turn codes of :meth:`round_span` into (n,) float32: ``(2 * code - levels) * (scale / levels)``."""
        ...

    def split_means(self, x: np.ndarray, means: np.ndarray, signs: np.ndarray) -> None:
        """Means of the negative and of the other entries of each column.

        Args:
            x: (outer, columns, inner) floats.
            means: (2, columns) float32, written: of those below 0, of the others; 0 where there are none.
            signs: (outer * columns * inner,) uint8, written: 1 unless below 0.
        """
        ...

    def spread_means(self, signs: np.ndarray, means: np.ndarray, out: np.ndarray) -> None:
        """Undo :meth:`split_means` as far as it goes: ``out`` (outer, columns, inner) float32."""
        ...

    def gamma_encode(self, codes: np.ndarray, levels: int, words: np.ndarray) -> tuple[int, int]:
        """Write codes of :meth:`round_signed` that are not ``levels`` as Elias gamma codes.

        Each is gamma(distance from the last), one bit for the sign, gamma(magnitude). gamma(v) is as many zeros as v
        has bits after its first, a one, and those bits, the lowest first.

        Args:
            codes: (n,) uint8.
            levels: the code that stands for 0.
            words: (w,) uint64 that suffice.

        Returns:
            Entries, and bits written.
        """
        ...

    def gamma_decode(self, words: np.ndarray, bits: int, entries: int, levels: int, codes: np.ndarray) -> bool:
        """Undo :meth:`gamma_encode`; returns False where the bits are none that it writes."""
        ...


@lru_cache(maxsize=1)
def loops() -> Loops:
    """The loops. Numba is imported on the first call, not with the package.

    Raises:
        ConfigError: Numba cannot be imported; the message says why.
    """
    try:
        from dgc.core.compressors.quantizers import numba_loops

        return numba_loops
    except ImportError as error:
        raise ConfigError(
            f"compressors that send every entry in few bits need Numba, which cannot be imported here ({error}); mend "
            "it (pip install numba), or choose one that sends some entries, such as Compression.topk()"
        ) from error
