"""How one step's gradients are reduced, whoever reduces them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ReduceOptions:
    """What a wrapper was told beside the optimizer and the compression.

    Attributes:
        op: Horovod's Average or Sum; None for the compressor's own, or Average.
        process_set: the ranks that exchange; None for the compressor's own, or all.
        sparse_as_dense: turn ``tf.IndexedSlices`` into tensors, which are compressed too.
        passes: ``backward_passes_per_step``: gradients of this many steps are added up before they are exchanged.
        average_passes: divide the added gradients by ``passes``.
        predivide: ``gradient_predivide_factor`` of Horovod's dense exchange: this much of the average's division is
            done before the sum. Ours divides once, in float32.
        scale_local: ``scale_local_gradients``: divide gradients that stay on their rank by the number of ranks.
    """

    op: Any = None
    process_set: Any = None
    sparse_as_dense: bool = False
    passes: int = 1
    average_passes: bool = False
    predivide: float = 1.0
    scale_local: bool = True


DEFAULTS = ReduceOptions()
"""Average over the compressor's ranks, at each step."""
