"""Seeds for Keras: Paddle's ``DGCMomentum``.

They use only the public names of a few modules, which pyproject.toml lists. Nothing else of the package imports them.
"""
