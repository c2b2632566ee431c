"""Gradient compression for PyTorch scripts under torchrun or Horovod.

With ``DistributedDataParallel``::

    import dgc.torch as dgc

    compression = dgc.Compression.dgc(steps=epochs * len(loader))
    dgc.ddp.register(model, optimizer, compression)

Instead of ``DistributedDataParallel`` or ``hvd.DistributedOptimizer``::

    optimizer = dgc.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
"""

from dgc import errors
from dgc.contrib import paddle
from dgc.contrib.paddle import *  # noqa: F403
from dgc.errors import *  # noqa: F403
from dgc.torch import ddp
from dgc.torch.compressor import Compression, DGCCompressor
from dgc.torch.contrib.fuse import fuse_optimizer, fuse_step, is_fused_optimizer
from dgc.torch.contrib.momentum import DGCMomentum
from dgc.torch.contrib.zero import ZeroRedundancyOptimizer
from dgc.torch.distributed import broadcast_parameters
from dgc.torch.join import join
from dgc.torch.optimizer import DistributedOptimizer
from dgc.torch.rank_state import RankState

DGCMomentumOptimizer = DGCMomentum  # Paddle's name

__all__ = [
    "Compression",
    "DGCCompressor",
    "DGCMomentum",
    "DGCMomentumOptimizer",
    "DistributedOptimizer",
    "RankState",
    "ZeroRedundancyOptimizer",
    "broadcast_parameters",
    "ddp",
    "fuse_optimizer",
    "fuse_step",
    "is_fused_optimizer",
    "join",
]
__all__ += errors.__all__
__all__ += paddle.__all__


def __dir__() -> list[str]:
    return sorted(__all__)
