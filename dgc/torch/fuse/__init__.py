"""Update many parameters with few kernel calls: Bagua's ``fuse_optimizer`` for any element-wise torch optimizer."""

from dgc.torch.fuse.api import fuse_optimizer, fuse_step, is_fused_optimizer

__all__ = ["fuse_optimizer", "fuse_step", "is_fused_optimizer"]
