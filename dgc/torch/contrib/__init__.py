"""Seeds for PyTorch: ZeRO, fused optimizers, Paddle's ``DGCMomentum`` and elastic Horovod.

They use only the public names of a few modules, which pyproject.toml lists. Nothing else of the package imports them.
"""
