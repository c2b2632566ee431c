"""``python -m dgc doctor`` in environments that are broken on purpose; packages are stand-ins of a few lines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
MAPS = "import mmap, pathlib\nfile = open(pathlib.Path(__file__).parent / {library!r} / 'libmpi.so.40', 'rb')\n"
MAPS += "held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
HOROVOD = "def yes(): return True\nmpi_built = gloo_built = yes\ndef nccl_built(): return False\n"
ABSENT = "import sys\nraise ModuleNotFoundError(\"No module named '{0}'\", name='{0}')\n"
TORCH = "__version__ = '2.13.0'\nclass version: cuda = {cuda!r}\nclass cuda:\n    def is_available(): return {gpu}\n"
CUPY = """__version__ = '14.2.0'
class cuda:
    class runtime:
        def runtimeGetVersion(): return {cuda}
        def getDeviceCount(): {count}
"""
HEALTHY = {
    "numpy": "__version__ = '2.4.6'\n",
    "numba": "__version__ = '0.68.1'\n",
    "torch": TORCH.format(cuda=None, gpu=False),
    "tensorflow": ABSENT.format("tensorflow"),
    "cupy": ABSENT.format("cupy"),
    "mpi4py": "__version__ = '4.1.2'\nclass rc: pass\n",
    "mpi4py.MPI": MAPS.format(library="../one"),
    "horovod": "__version__ = '0.28.1'\n",
    "horovod.torch": MAPS.format(library="../one") + HOROVOD,
    "horovod.tensorflow": "raise ImportError('Extension horovod.tensorflow has not been built')\n",
}
SYMBOL = "raise ImportError('mpi_lib_v2.so: undefined symbol: _ZN3c105Error')\n"


@pytest.fixture
def doctor(tmp_path, monkeypatch):
    """Runs the command where some packages are not as they should be."""

    def run(text=False, path=f"{Path(sys.executable).parent}:/usr/bin:/bin", **changed):
        for folder in ("one", "other"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "libmpi.so.40").write_bytes(b"\0" * 4096)
        for name, source in {
            **HEALTHY,
            **{name.replace("__", "."): source for name, source in changed.items()},
        }.items():
            package, _, module = name.partition(".")
            (tmp_path / package).mkdir(exist_ok=True)
            (tmp_path / package / f"{module or '__init__'}.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
        monkeypatch.setenv("PATH", path)
        command = [sys.executable, "-m", "dgc", "doctor", *([] if text else ["--json"])]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.stderr == ""
        return done.returncode, done.stdout if text else json.loads(done.stdout)

    return run


def test_a_healthy_environment(doctor):
    status, report = doctor()
    assert (status, report["findings"]) == (0, [])
    assert report["found"]["horovod.tensorflow"] == {"missing": True}, "as TensorFlow is"
    assert "mpi4py, because Horovod runs on the same MPI" in report["uses"]["transport"]
    assert report["uses"]["kernels"] == "Numba"
    assert report["uses"]["device"].startswith("CPU")


GPU = TORCH.format(cuda="12.8", gpu=True)
BROKEN = {
    "old NumPy": ({"numpy": "__version__ = '1.24.0'\n"}, 1, "NumPy 1.24.0 is older than 1.26", "numpy>=1.26"),
    "old PyTorch": (
        {"torch": TORCH.format(cuda=None, gpu=False).replace("2.13.0", "2.3.1")}, 1,
        "PyTorch 2.3.1 is older than 2.7", "torch>=2.7",
    ),
    "no Numba": ({"numba": ABSENT.format("numba")}, 1, "numba cannot be imported", "pip install numba"),
    "no framework": ({"torch": ABSENT.format("torch")}, 1, "neither PyTorch nor TensorFlow", ".[torch]"),
    "torch without a library": (
        {"torch": "raise OSError('libtorch_cpu.so: cannot open shared object file')\n"}, 1,
        "torch is installed and cannot be imported: OSError: libtorch_cpu.so", "reinstall torch",
    ),
    "Horovod of another torch": ({"horovod__torch": SYMBOL}, 1, "does not fit this torch 2.13.0", "build-horovod"),
    "Horovod without torch": (
        {"horovod__torch": "raise ImportError('Extension horovod.torch has not been built')\n"}, 1,
        "built without torch", "build-horovod",
    ),
    "TensorFlow without Horovod": (
        {"tensorflow": "__version__ = '2.21.0'\n", "horovod": ABSENT.format("horovod")}, 1,
        "Horovod is needed with TensorFlow", "build-horovod",
    ),
    "no MPI": (
        {"mpi4py__MPI": "raise ImportError('libmpi.so.40: cannot open shared object file')\n"}, 0,
        "mpi4py finds no MPI: ImportError: libmpi.so.40", "openmpi",
    ),
    "mpi4py of another MPI": (
        {"mpi4py__MPI": MAPS.format(library="../other")}, 0, "another MPI", "--no-binary mpi4py",
    ),
    "CuPy without a driver": (
        {"cupy": CUPY.format(cuda=12090, count="raise RuntimeError('cudaErrorInsufficientDriver')")}, 0,
        "CuPy finds no device: RuntimeError: cudaErrorInsufficientDriver", "driver",
    ),
    "CuPy of another CUDA": (
        {"torch": GPU, "cupy": CUPY.format(cuda=13000, count="return 1")}, 0, "CuPy is for CUDA 13", "cupy-cuda12x",
    ),
    "a GPU without CuPy": ({"torch": GPU}, 0, "CuPy is missing", "cupy-cuda12x"),
    "an import that ends the process": (
        {"torch": "import os\nos._exit(3)\n"}, 1, "the process ended with status 3", "reinstall torch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_cause_and_remedy_of_a_broken_environment(doctor, name):
    changed, expected, cause, remedy = BROKEN[name]
    status, report = doctor(**changed)
    assert status == expected
    (finding,) = report["findings"]
    assert finding["level"] == ("error" if expected else "warning")
    assert cause in finding["cause"]
    assert remedy in finding["remedy"]


def test_an_environment_that_is_not_activated(doctor):
    status, report = doctor(path="/usr/bin:/bin")
    (finding,) = report["findings"]
    assert status == 0
    assert "not activated" in finding["cause"]
    assert f"{Path(sys.executable).parent}" in finding["remedy"]


def test_the_text_says_cause_and_remedy(doctor):
    status, text = doctor(text=True, torch=ABSENT.format("torch"), horovod=ABSENT.format("horovod"))
    assert status == 1
    assert "error: there is neither PyTorch nor TensorFlow\n  do: pip install" in text
    assert "transport          none" in text
