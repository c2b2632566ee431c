"""Codecs of positions and of values: how the entries of a message become bytes."""
