"""Who owns which parameter: a greedy balanced partition that every rank computes alike.

P = number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Partition:
    """Owners of the parameters of all groups so far.

    Attributes:
        size: P.
        loads: (P,) elements per rank; carried from group to group, so that the whole model is balanced.
        owners: by group, the owning rank of each parameter in registration order.
    """

    size: int
    loads: list[int] = field(default_factory=list)
    owners: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start with empty ranks."""
        self.loads = self.loads or [0] * self.size

    def copy(self) -> Partition:
        """The same owners, to go on from independently."""
        return Partition(self.size, list(self.loads), [list(owners) for owners in self.owners])

    def add_group(self, numels: Sequence[int]) -> list[int]:
        """Give each parameter of a new group to the rank with the least elements so far, the largest first.

        Earlier groups keep their owners. Ties go to the lower rank and, among parameters, to the earlier one.

        Args:
            numels: elements of each parameter in registration order, frozen ones included.

        Returns:
            The owners in registration order.

        Source: Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054 (stage 1); greedy scheduling after Graham 1969.
        """
        owners = [0] * len(numels)
        for i in sorted(range(len(numels)), key=lambda i: -numels[i]):
            rank = self.loads.index(min(self.loads))
            owners[i] = rank
            self.loads[rank] += numels[i]
        self.owners.append(owners)
        return owners

    def indices(self) -> list[list[list[int]]]:
        """By rank and group, the owned parameters' numbers, counted over all groups in registration order."""
        table: list[list[list[int]]] = [[[] for _ in self.owners] for _ in range(self.size)]
        number = 0
        for group, owners in enumerate(self.owners):
            for owner in owners:
                table[owner][group].append(number)
                number += 1
        return table
