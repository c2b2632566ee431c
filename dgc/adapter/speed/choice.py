"""Compressed or dense, for each bucket: chosen at construction, the same on all ranks, and kept for the whole run.

A bucket that is chosen dense is one without sparsified or coded tensors: nothing else in the exchange knows of the
choice. So it is dense training exactly, has no residuals, and its saved state has none, which is how a resumed run
knows the choice.

Only what the ranks have agreed on enters: the slowest rank's measurements, the options, and loaded states.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dgc.adapter.speed.network import Network, measure_network
from dgc.adapter.speed.work import Cost, Echo, last_level, measure_cost
from dgc.core.config import DGCConfig
from dgc.core.exchange.encoders.choose import make_encoders
from dgc.core.kernels.choose import choose_kernels
from dgc.core.layout import Bucket, Layout
from dgc.core.plan import BucketPlan
from dgc.core.transport import Transport
from dgc.transport.agreement import agree_or_raise

logger = logging.getLogger("dgc")


class Choice:
    """Which buckets are sent dense, by the option ``exchange``.

    Attributes:
        network: what "auto" has measured; None if it has not.
        reason: why "auto" predicts nothing; None if it does.
    """

    def __init__(self, config: DGCConfig) -> None:
        """Choose nothing yet."""
        self._config = config
        self._ranks = 1
        self.network: Network | None = None
        self._works: list[Cost] = []
        self._dense: dict[str, bool] = {}  # tensors that were chosen for, or whose state says how they were sent
        self._predicted: dict[tuple[str, ...], tuple[float, float]] = {}
        self._told = False
        self.reason: str | None = None

    def measure(self, transport: Transport, entries_alone: bool) -> None:
        """Learn what "auto" needs; collective for that option, the same on all ranks, and nothing for the others.

        Args:
            transport: connects the ranks; nothing else uses it meanwhile.
            entries_alone: see :func:`dgc.adapter.speed.work.measure_cost`.

        Raises:
            DGCError: a collective failed, or this or another rank could not measure.
        """
        if self._config.exchange != "auto":
            return
        if transport.size == 1:
            self.reason = "there is one rank"
        elif self._config.clips_tensors:
            self.reason = "dense tensors are not clipped one by one"
        if self.reason is not None:
            return
        self._ranks, self._told = transport.size, transport.rank != 0
        own: list[float] = []

        def work() -> dict[str, Any]:
            found = measure_cost(self._config, transport.size, entries_alone)
            own.extend((found.sparse, found.dense))
            return {}

        agree_or_raise(transport, work, "measurements")
        self.network = measure_network(transport)
        slowest = np.array(own)
        transport.allreduce(slowest, "max")
        self._works = [Cost(float(sparse), float(dense)) for sparse, dense in slowest.reshape(-1, 2)]

    def placed(self, layout: Layout, on_device: bool = False) -> Layout:
        """The layout with its dense buckets. Local: no communication.

        Args:
            layout: as the options say.
            on_device: whether the arrays are a GPU's, for which nothing is predicted.
        """
        if on_device and self._config.exchange == "auto":
            self.reason = "the gradients are on a GPU"
        dense = [b.index for b in layout.buckets if self._is_compressed(b) and self._is_dense(b, layout)]
        if self._predicted and not self._told and not any(map(self._is_compressed, layout.with_dense(dense).buckets)):
            self._told = True
            logger.warning(
                "nothing is compressed: a dense exchange is predicted to be faster here, %.1f ms a step instead of "
                "%.1f; exchange='sparse' compresses all the same",
                *(1e3 * sum(each) for each in zip(*self._predicted.values(), strict=True)),
            )
        return layout.with_dense(dense)

    def follow(self, parameters: Mapping[str, Mapping[str, Any]]) -> bool:
        """Send tensors from now on as they were sent where a state was saved, unless the option says how.

        Residuals and a rank's own momentum belong to the compressed way; there is no dense step that sends both once.

        Args:
            parameters: of a state: name -> entry.

        Returns:
            Whether that changes anything.
        """
        if self._config.exchange != "auto":
            return False
        before = dict(self._dense)
        self._dense.update(
            {name: "exchange" in entry for name, entry in parameters.items() if {"v", "error", "exchange"} & set(entry)}
        )
        return before != self._dense

    def kinds(self, layout: Layout, saved: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, bool], set[str]]:
        """What tensors will be once the state ``saved`` was followed.

        Returns:
            Name -> whether it is sparsified, and the names of those that may be sent coded.
        """
        sparsified, small = layout.sparsified(), layout.small()
        if self._config.exchange == "auto":
            chosen = [name for i in layout.chosen if (name := layout.parameters[i].name) in saved]
            sparsified.update({name: "v" in saved[name] for name in chosen})
            small.update(name for name in chosen if "error" in saved[name])
        return sparsified, small

    def describe(self, layouts: Iterable[Layout]) -> dict[str, Any]:
        """The choice in plain values.

        Args:
            layouts: what :meth:`placed` returned.
        """
        rows = []
        for layout in layouts:
            for bucket in layout.buckets:
                names = tuple(layout.parameters[s.parameter].name for s in bucket.segments)
                dense, sparse = self._predicted.get(names, (None, None))
                rows.append(
                    {
                        "elements": sum(s.length for s in bucket.segments),
                        "exchange": "sparse" if self._is_compressed(bucket) else "dense",
                        "dense_ms": None if dense is None else round(1e3 * dense, 3),
                        "sparse_ms": None if sparse is None else round(1e3 * sparse, 3),
                    }
                )
        return {"option": self._config.exchange, "reason": self.reason, "buckets": rows}

    # -- inside --------------------------------------------------------------------------------------------------

    def _is_compressed(self, bucket: Bucket) -> bool:
        return bool(bucket.sparse) or (bool(bucket.small_size) and self._config.small != "float32")

    def _is_dense(self, bucket: Bucket, layout: Layout) -> bool:
        names = [layout.parameters[s.parameter].name for s in bucket.sparse + bucket.small]
        known = [self._dense[name] for name in names if name in self._dense]
        if known:
            # Buckets may have been cut otherwise: what is compressed already stays so, what is dense may follow.
            dense = all(known)
        elif self._config.exchange != "auto" or self.reason is not None or self.network is None:
            dense = self._config.exchange == "dense"
        else:
            seconds = self._predict(bucket, layout)
            self._predicted[tuple(layout.parameters[s.parameter].name for s in bucket.segments)] = seconds
            dense = seconds[0] < seconds[1]
        self._dense.update(dict.fromkeys(names, dense))
        return dense

    def _predict(self, bucket: Bucket, layout: Layout) -> tuple[float, float]:
        """Seconds of a step of this bucket past the ramp-up: dense, sparse."""
        config, work, wide = self._config, self._works[0], 2 if bucket.dtype == "float64" else 1
        alone = dataclasses.replace(layout, buckets=(bucket,))
        ((encoder, _),) = make_encoders(alone, last_level(config), choose_kernels("cpu"), Echo(self._ranks))
        rest = bucket.size - bucket.sparse_size
        dense = self._on_the_way(encoder.plan_at(None)) + wide * work.dense * bucket.size
        sparse = self._on_the_way(encoder.plan_at(1.0 - config.sparsity[-1]))
        return dense, sparse + wide * (work.sparse * bucket.sparse_size + work.dense * rest)

    def _on_the_way(self, plan: BucketPlan) -> float:
        assert self.network is not None
        summed = self.network.reduce.seconds(plan.vector_size * plan.itemsize) if plan.allreduces else 0.0
        return self.network.gather.seconds(plan.message_bytes) + summed
