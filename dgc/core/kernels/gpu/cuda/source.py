"""The CUDA sources, joined into the one text that is compiled. No CuPy here: tests compile it for a processor too."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

FILES = ("common.cuh", "sweep.cu", "select.cu", "message.cu", "entries.cu", "dense.cu", "codes.cu")

THREADS = 256
"""Threads of every block; THREADS in common.cuh."""
WARPS = THREADS // 32
TILE = 4096
"""Elements of one segment that a block updates together; TILE in common.cuh."""
ROWS = 64
"""Rows of a matrix that are added up together, column by column; ROWS in codes.cu."""
SPAN = 16
"""Tiles that a block tallies together; SPAN in common.cuh."""
BIN_BITS = 12
BINS = 1 << BIN_BITS

_KERNEL = re.compile(r'extern "C" __global__ void __launch_bounds__\(THREADS\) dgc_(\w+)\(')


@cache
def source() -> str:
    """The whole text; lines are numbered by file for the compiler's messages."""
    package = files(__package__)
    return "\n".join(f'#line 1 "{name}"\n{package.joinpath(name).read_text()}' for name in FILES)


@cache
def kernel_names() -> tuple[str, ...]:
    """All kernels of the sources, without the prefix ``dgc_``.

    The prefix is needed: NVRTC 12.9 crashes on a kernel that is called just ``mask`` beside one that shuffles.
    """
    return tuple(_KERNEL.findall(source()))


def compile_options(state_bits: int) -> tuple[str, ...]:
    """Options of NVRTC beside the architecture.

    Args:
        state_bits: 32 or 64, the size of u and v's floats.
    """
    # Without fmad=false a product and a sum become one rounding, and results differ from the CPU's; without ftz=false
    # so do small numbers.
    return ("-std=c++17", "-fmad=false", "-ftz=false", f"-DSTATE_BITS={state_bits}")
