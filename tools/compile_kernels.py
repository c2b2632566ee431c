#!/usr/bin/env python3
"""Compile the CPU kernels into Numba's cache, half a minute once; a second where they are cached already."""

from dgc.core.kernels.cpu.backend import NumbaKernels
from dgc.core.wire.codecs.loops import bit_kernels, default_loops


def main() -> None:
    for threads in (1, 2):
        for dtype in ("float32", "float64"):
            NumbaKernels(threads).warm_up(dtype)
    default_loops()
    bit_kernels()


if __name__ == "__main__":
    main()
