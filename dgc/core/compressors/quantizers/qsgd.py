"""QSGD: random rounding to a few levels of the norm of each group, without bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from dgc.core.compressors.base import BucketSpec, DenseValues, StepInfo, Tensor, put, take, take_scales
from dgc.core.compressors.quantizers.codes import LARGEST_GROUP, Coded, CodeForm
from dgc.core.config.checks import require_choice, require_integer
from dgc.core.config.config import DGCConfig
from dgc.core.wire.codecs.blocks import padded
from dgc.errors import WireError


@dataclass(frozen=True)
class QsgdOptions:
    """Options of ``qsgd``."""

    bits: int = 4
    """2, 4 or 8: s = 1, 7 or 127 levels of either sign."""
    bucket_size: int = 512
    """Elements that share a norm (the paper's bucket)."""
    norm: Literal["l2", "max"] = "l2"
    """"l2" as in the paper's analysis, or "max" as in its experiments: less variance, fewer zeros."""
    coding: str = "fixed"
    """"fixed": ``bits`` an element; "elias": distances and magnitudes as Elias codes, whose length varies."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        require_choice("bits", self.bits, (2, 4, 8))
        require_integer("bucket_size", self.bucket_size, 1)
        require_choice("norm", self.norm, ("l2", "max"))
        require_choice("coding", self.coding, ("fixed", "elias"))


class Qsgd(Coded):
    """Quantised SGD: unbiased, without error feedback.

    In each bucket of d elements ``Q(x_i) = norm * sign(x_i) * ξ_i``: with ``a = |x_i| * s / norm``, ξ is
    ``(floor(a) + 1) / s`` with probability ``a - floor(a)``, else ``floor(a) / s``. Its variance is at most
    ``min(d / s², sqrt(d) / s) * norm²`` for the L2 norm. ceil(log2(2s + 1)) bits an element, and a float a bucket.

    Departure: ``coding="elias"`` writes Elias gamma codes instead of the paper's recursive ones, which are longer for
    levels below 32. The lengths differ then, so the ranks ask for the longest before they exchange.

    Source: Alistarh et al. 2017, arXiv 1610.02132.
    """

    name = "qsgd"
    number = 7
    source = "Alistarh et al. 2017, arXiv 1610.02132"
    bits = "4 (or 2, 8, Elias) + 1 float a 512"
    error_feedback = False
    unbiased = True
    Options = QsgdOptions
    options: QsgdOptions

    @classmethod
    def runs_on_device(cls, config: DGCConfig) -> bool:
        """Unless the codes' lengths vary, or a norm is of very many elements."""
        own: QsgdOptions = config.own
        return own.coding == "fixed" and own.bucket_size <= LARGEST_GROUP

    @property
    def varying(self) -> bool:  # noqa: D102
        return self.options.coding == "elias"

    @property
    def _levels(self) -> int:
        return (1 << self.options.bits - 1) - 1

    def form(self, tensor: Tensor) -> CodeForm:  # noqa: D102
        own = self.options
        return CodeForm("signed", own.bits, self._levels, self._groups(tensor), own.bucket_size, norm=own.norm)

    def tensor_bytes(self, tensor: Tensor, spec: BucketSpec) -> int:  # noqa: D102
        if not self.varying:
            return super().tensor_bytes(tensor, spec)
        # The longest: every element sent, at distance 1 (one bit), with its sign and the code of the largest level.
        longest = 2 + 2 * (self._levels.bit_length() - 1) + 1
        return padded(4 * self._groups(tensor)) + 16 + 8 * -(-tensor.n * longest // 64)

    def encode(self, x: np.ndarray, out: np.ndarray, spec: BucketSpec, info: StepInfo) -> tuple[int, int]:
        """See the base class. With Elias codes, blocks follow each other without gaps."""
        from dgc.core.wire.codecs import numba_packing as packing

        if not self.varying:
            return super().encode(x, out, spec, info)
        at = 0
        for tensor in spec.tensors:
            norms, codes = self.quantise(x[tensor.slice], tensor, spec, info)
            at = padded(put(out, at, norms))
            words = np.empty((self.tensor_bytes(tensor, spec) - padded(norms.nbytes) - 16) // 8, np.uint64)
            entries, bits = packing.gamma_encode(codes, self._levels, words)
            at = put(out, at, np.array([entries, bits], "<u8"))
            at = put(out, at, words[: -(-bits // 64)])
        return sum(t.n for t in spec.tensors), at

    def decode(self, data: np.ndarray, count: int, spec: BucketSpec) -> DenseValues:
        """See the base class."""
        from dgc.core.wire.codecs import numba_packing as packing

        if not self.varying:
            return super().decode(data, count, spec)  # type: ignore[return-value]
        at, values = 0, []
        for tensor in spec.tensors:
            norms = take_scales(data, at, self._groups(tensor))
            at = padded(at + norms.nbytes)
            entries, bits = (int(v) for v in take(data, at, 2, "<u8"))
            if entries > tensor.n or bits > 8 * data.size:
                raise WireError(f"{tensor.name!r} cannot have {entries} entries in {bits} bits")
            words = take(data, at + 16, -(-bits // 64), np.uint64)
            at += 16 + words.nbytes
            codes = np.empty(tensor.n, np.uint8)
            if not packing.gamma_decode(words, bits, entries, self._levels, codes):
                raise WireError(f"the codes of {tensor.name!r} are none that a sender writes; the message is damaged")
            values.append(self.restore(norms, codes, tensor))
        if count != sum(t.n for t in spec.tensors):
            raise WireError(f"a message with {count} entries came where every element is sent")
        return DenseValues(values)

    def _groups(self, tensor: Tensor) -> int:
        return -(-tensor.n // self.options.bucket_size)

    def quantise(  # noqa: D102
        self, x: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo
    ) -> tuple[np.ndarray, np.ndarray]:
        from dgc.core.compressors.quantizers import numba_loops as loops

        group = self.options.bucket_size
        exact = np.empty(self._groups(tensor))
        # Never below a group's largest magnitude, or that would be cut and not rounded.
        loops.norms(x, group, self.options.norm == "l2", exact)
        norms = np.minimum(exact, np.finfo(np.float32).max).astype(np.float32)
        if x.dtype != np.float32:
            norms = np.where(norms < exact, np.nextafter(norms, np.float32(np.inf)), norms)
            norms = np.minimum(norms, np.finfo(np.float32).max)
        codes = np.empty(tensor.n, np.uint8)
        loops.round_signed(x, norms, group, np.inf, self._levels, info.key(tensor.name), codes)
        return norms, codes

    def restore(self, scales: np.ndarray, codes: np.ndarray, tensor: Tensor) -> np.ndarray:  # noqa: D102
        from dgc.core.compressors.quantizers import numba_loops as loops

        out = np.empty(codes.size, np.float32)
        if not loops.scale_signed(codes, scales, self.options.bucket_size, self._levels, out):
            raise WireError("a level is beyond the largest; the message is damaged")
        return out
