"""The CUDA sources compile for the architectures that NVRTC knows, without a device."""

import os
import re
import subprocess
import sys

import pytest

from dgc.core.kernels.gpu.cuda import source

GENERATIONS = (90, 100, 120)
"""What is compiled for in every run, beside the oldest; where a GPU is required, all that this NVRTC knows."""


def architectures():
    """Those that this NVRTC compiles for: 12 knows 50 to 121, 13 begins with 75."""
    try:
        from cupy.cuda import nvrtc as library

        known = library.getSupportedArchs()
    except Exception:
        return [GENERATIONS[0]]  # whose test says why there is no compiler
    if os.environ.get("DGC_REQUIRE_GPU") == "1":
        return list(known)
    return [min(known), *(a for a in GENERATIONS if a in known)]


def nvrtc():
    pytest.importorskip("cupy", reason="CuPy is not installed: pip install cupy-cuda12x")
    from cupy.cuda import nvrtc as library

    try:
        library.getVersion()
    except Exception as error:
        pytest.skip(f"NVRTC cannot be loaded ({error}): pip install nvidia-cuda-nvrtc-cu12")
    return library


def compiled(text, options):
    library = nvrtc()
    program = library.createProgram(text, "dgc.cu", (), ())
    try:
        library.compileProgram(program, options)
    except library.NVRTCError:
        return None, library.getProgramLog(program)
    return library.getCUBIN(program), library.getProgramLog(program)


@pytest.mark.parametrize("state_bits", [32, 64])
@pytest.mark.parametrize("architecture", architectures())
def test_sources_compile(architecture, state_bits):
    nvrtc()
    # In a process of its own: a compiler that crashes must fail this test, not end the run.
    code = (
        "import sys; from cupy.cuda import nvrtc; from dgc.core.kernels.gpu.cuda import source as s\n"
        "program = nvrtc.createProgram(s.source(), 'dgc.cu', (), ())\n"
        "try:\n"
        f"    nvrtc.compileProgram(program, s.compile_options({state_bits}) + ('-arch=sm_{architecture}',))\n"
        "finally:\n"
        "    sys.stderr.write(nvrtc.getProgramLog(program))\n"
        "sys.stdout.buffer.write(nvrtc.getCUBIN(program))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=600)
    log = done.stderr.decode(errors="replace")
    assert done.returncode == 0, log[-3000:]
    assert "error" not in log
    assert [line for line in log.splitlines() if "warning" in line and "deprecated" not in line] == []
    for name in source.kernel_names():
        assert f"dgc_{name}".encode() in done.stdout, name


def test_products_and_sums_are_rounded_apart():
    """A contraction would make results differ from the CPU's: no fused multiply-add may be in the code."""
    library = nvrtc()
    program = library.createProgram(source.source(), "dgc.cu", (), ())
    library.compileProgram(program, (*source.compile_options(32), "-arch=compute_80"))
    ptx = library.getPTX(program)
    ptx = ptx.decode() if isinstance(ptx, bytes) else ptx
    assert "mul.rn.f32" in ptx or "mul.f32" in ptx
    assert not re.search(r"\bfma\.rn\.f(32|64)", ptx)
    assert ".ftz" not in ptx, "denormal numbers must be kept"


def test_a_wrong_source_is_refused():
    cubin, log = compiled(source.source().replace("key_of(x) >= INFINITY_KEY", "key_of(x) >= NO_SUCH_NAME"),
                          (*source.compile_options(32), "-arch=sm_80"))  # fmt: skip
    assert cubin is None
    assert "NO_SUCH_NAME" in log


def test_constants_agree():
    text = source.source()
    for name in ("THREADS", "TILE", "SPAN", "BIN_BITS"):
        assert int(re.search(rf"#define {name} (\d+)", text).group(1)) == getattr(source, name)
