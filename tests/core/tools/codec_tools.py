"""Shared by the tests of value codecs."""

import numpy as np


def read_back(codec, values, bounds):
    """What every receiver will read of (k,) values in groups."""
    block = np.empty(codec.max_bytes(values.size, bounds.size - 1), np.uint8)
    codec.encode(values, bounds, block)
    return codec.decode(block, values.size, bounds)[0]
