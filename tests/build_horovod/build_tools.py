"""What the tests of the Horovod build share."""

from pathlib import Path

from dgc.build_horovod.toolchain import Toolchain


def make_toolchain(**changes):
    values = {
        "torch": "2.13.0", "tensorflow": None, "mpi": "openmpi4.1.8", "mpicxx": Path("/usr/bin/mpicxx"),
        "cmake": Path("cmake"), "cmake_version": (4, 0, 0), "compiler": Path("c++"), "compiler_version": "c++ 12",
        "jobs": 3, **changes,
    }  # fmt: skip
    return Toolchain(**values)
