"""The kernels' texts as CuPy makes kernels of them, compiled by NVRTC without a device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_device import fake_kernels, launched, ndarray, needs_compiler

from dgc.core.kernels.device import OPTIONS, PREAMBLE, TEXTS

NEWEST = 120  # is compiled for in every run, beside the oldest; where a GPU is required, all that this NVRTC knows
# With these, and in this order, CuPy compiles: what comes last counts.
CUPYS_OPTIONS = ("-std=c++17", *OPTIONS, "-ftz=true")
HEADERS = "".join(f"#include <cupy/{name}.cuh>\n" for name in ("complex", "carray", "atomics"))


def nvrtc():
    pytest.importorskip("cupy", reason="CuPy is not installed: pip install cupy-cuda12x")
    from cupy.cuda import nvrtc as library

    try:
        library.getVersion()
    except Exception as error:
        pytest.skip(f"NVRTC cannot be loaded ({error}): pip install nvidia-cuda-nvrtc-cu12")
    return library


def architectures():
    """Those that this NVRTC compiles for: 12 knows 50 to 121, 13 begins with 75."""
    try:
        from cupy.cuda import nvrtc as library

        known = library.getSupportedArchs()
    except Exception:
        return [NEWEST]  # whose test says why there is no compiler
    if os.environ.get("DGC_REQUIRE_GPU") == "1":
        return list(known)
    return [min(known), *(a for a in known if a == NEWEST)]


@pytest.fixture(scope="module")
def sources():
    """By kernel and type, what CuPy's own code generator makes of it for the arguments of a real launch."""
    nvrtc()
    import cupy
    from cupy._core import _carray, _kernel

    launched.clear()
    fake_kernels().warm_up()
    assert {name for name, _ in launched} == {f"dgc_{name}" for name in TEXTS}
    made = {}
    for (name, kind), arguments in launched.items():
        text = TEXTS[name.removeprefix("dgc_")]
        kernel = cupy.ElementwiseKernel(text.inputs, text.outputs, text.body, name, preamble=PREAMBLE, options=OPTIONS)
        assert len(arguments) == kernel.nargs
        # An array's type decides what T is; of a number CuPy does not ask.
        types = [a.dtype.type if isinstance(a, ndarray) else None for a in arguments]
        inputs, outputs, type_map = _kernel._decide_params_type(
            kernel.in_params, kernel.out_params, tuple(types[: kernel.nin]), tuple(types[kernel.nin :])
        )
        infos = [
            _kernel._ArgInfo(1, cupy.ndarray, t, 1, True, True)
            if isinstance(a, ndarray)
            else _kernel._ArgInfo(3, type(a), t, 0, True, True)
            for a, t in zip(arguments, (*inputs, *outputs), strict=True)
        ]
        infos.append(_kernel._ArgInfo(2, _carray.Indexer, None, 1, True, True))
        made[name, kind] = _kernel._get_elementwise_kernel_code(
            tuple(infos), type_map, kernel.params, kernel.operation, kernel.name, kernel.preamble
        )
    return made


def compiled(library, text, *options):
    """PTX, or machine code for an architecture of ``sm_``; and the compiler's log."""
    import cupy

    include = Path(cupy.__file__).parent / "_core" / "include"
    bundled = [include / "cupy" / "_cccl" / name for name in ("cub", "thrust", "libcudacxx")]
    paths = [f"-I{path}" for path in (include, *bundled)]
    try:
        import nvidia.cuda_runtime as runtime

        paths.append(f"-I{Path(runtime.__path__[0]) / 'include'}")
    except ImportError:
        pass
    program = library.createProgram(HEADERS + text, "dgc.cu", (), ())
    try:
        library.compileProgram(program, (*CUPYS_OPTIONS, *paths, *options))
    except library.NVRTCError:
        return None, library.getProgramLog(program)
    made = library.getCUBIN(program) if any("sm_" in o for o in options) else library.getPTX(program)
    return made if isinstance(made, bytes) else made.encode(), library.getProgramLog(program)


@needs_compiler
@pytest.mark.parametrize("architecture", architectures())
def test_texts_compile(architecture, sources, tmp_path):
    """In a process of its own: a compiler that crashes must fail this test, not end the run."""
    code = (
        "import sys; sys.path[:0] = sys.argv[2:4]; from test_texts import compiled, nvrtc\n"
        "for i in range(int(sys.argv[4])):\n"
        "    made, log = compiled(nvrtc(), open(f'{sys.argv[5]}/{i}.cu').read(), '-arch=sm_' + sys.argv[1])\n"
        "    said = [line for line in log.splitlines() if 'warning' in line and 'deprecated' not in line]\n"
        "    sys.exit(log) if made is None or said else None\n"
    )
    for i, text in enumerate(sources.values()):
        (tmp_path / f"{i}.cu").write_text(text)
    tools = Path(sys.modules["fake_device"].__file__).parent
    arguments = [str(architecture), str(Path(__file__).parent), str(tools), str(len(sources)), str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, timeout=900)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-3000:]


@needs_compiler
def test_products_and_sums_are_rounded_apart(sources):
    """A contraction would make results differ from the CPU's: no fused multiply-add may be in the code."""
    for name in ("dgc_sweep", "dgc_update"):
        ptx, log = compiled(nvrtc(), sources[name, "float32"], "-arch=compute_80")
        assert ptx is not None, log
        assert re.search(rb"mul(\.rn)?(\.ftz)?\.f32", ptx)
        assert not re.search(rb"\bfma\.rn(\.ftz)?\.f(32|64)", ptx)
