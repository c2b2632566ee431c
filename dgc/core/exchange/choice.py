"""Choose the plan of a bucket at a density: the one that costs least."""

from __future__ import annotations

from collections.abc import Callable

from dgc.core.collectives import BYTE_LIMIT, Transport
from dgc.core.compressors import compressor_class
from dgc.core.config import DGCConfig
from dgc.core.exchange.dense_sum import DenseSum
from dgc.core.exchange.encoders import AlgorithmEncoder, Encoder, TopKEncoder, kernels_select
from dgc.core.exchange.gather import Gather
from dgc.core.exchange.owners import Owners
from dgc.core.exchange.plan import Plan
from dgc.core.exchange.sizes import Setting
from dgc.core.kernels.base import Kernels
from dgc.core.layout import Bucket, Layout
from dgc.core.stripes import Stripes
from dgc.errors import LayoutError

# Owners add up entries if this costs at most this share of the cheaper of the other ways. A smaller saving does not pay
# for a second rounding.
OWNERS_SHARE = 0.6


def entry_plan(
    bucket: Bucket, config: DGCConfig, density: float | None, ranks: int, *, has_alltoall: bool = True, rank: int = 0
) -> Plan:
    """Return how dgc and topk send a bucket over a transport, with or without alltoall."""
    setting = Setting(bucket, config, density, ranks, rank)
    encoder = TopKEncoder(setting)
    deals = encoder.ks and ranks > 1 and has_alltoall and config.exchange == "auto"
    return cheapest(setting, encoder, Owners(setting, encoder) if deals else None)


def cheapest(setting: Setting, encoder: Encoder, owners: Owners | None = None) -> Plan:
    """Return the plan that costs least.

    Raises:
        LayoutError: no collective takes its message.
    """
    plan: Plan = DenseSum(setting, encoder) if setting.density is None else Gather(setting, encoder)
    if encoder.ks:
        plan = min(plan, DenseSum(setting, encoder), key=lambda each: each.traffic.cost)
    if owners is not None and owners.traffic.cost <= OWNERS_SHARE * plan.traffic.cost:
        plan = owners
    if plan.largest > BYTE_LIMIT:
        raise LayoutError(
            f"bucket {setting.bucket.index} would send a message of {plan.largest} bytes; the limit is 2 GiB: choose a "
            "higher sparsity, or exclude its largest parameter"
        )
    return plan


class Plans(dict[float | None, Plan]):
    """The plans of one bucket, by density. Each is made when it is first asked for."""

    def __init__(self, make: Callable[[float | None], Plan]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, density: float | None) -> Plan:
        self[density] = plan = self._make(density)
        return plan

    @property
    def stripes(self) -> Stripes | None:
        """The positions whose sums this rank keeps; None if no plan so far keeps any."""
        return next((plan.stripes for plan in self.values() if plan.stripes), None)


def make_plans(layout: Layout, config: DGCConfig, kernels: Kernels, transport: Transport) -> list[Plans]:
    """Return each bucket's plans, among them those of all densities of the schedule."""
    algorithm = None if kernels_select(config) else compressor_class(config.algorithm)(config)
    ranks, rank, has_alltoall = transport.size, transport.rank, transport.has_alltoall

    def plans_of(bucket: Bucket) -> Plans:
        def make(density: float | None) -> Plan:
            if algorithm is None:
                return entry_plan(bucket, config, density, ranks, has_alltoall=has_alltoall, rank=rank)
            setting = Setting(bucket, config, density, ranks, rank)
            return cheapest(setting, AlgorithmEncoder(setting, algorithm, kernels, transport, layout))

        return Plans(make)

    made = [plans_of(bucket) for bucket in layout.buckets]
    for plans in made:
        for sparsity in config.sparsities:
            _ = plans[1.0 - sparsity]
    return made
