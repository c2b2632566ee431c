"""Tools and seeds that need no framework: Paddle's arguments, and the commands bench, doctor and build-horovod.

They use only the public names of a few modules, which pyproject.toml lists. Nothing else of the package imports them.
"""
