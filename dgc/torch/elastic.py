"""Elastic Horovod: see :mod:`dgc.torch.contrib.elastic`."""

from dgc.torch.contrib.elastic import TorchState, run

__all__ = ["TorchState", "run"]
