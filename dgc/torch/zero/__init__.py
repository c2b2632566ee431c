"""Sharded optimizer state: every rank keeps and updates the state of its own share of the parameters."""

from dgc.torch.zero.optimizer import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
