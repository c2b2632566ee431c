"""The runtime on CuPy without a device: whose device is current, and which binaries it takes from the disk."""

import contextlib
import sys
import threading
import types

import numpy as np
import pytest

from dgc.core.kernels.gpu.memory import GROUP_BYTES, PLACE_BYTES

cupy_runtime = pytest.importorskip(
    "dgc.core.kernels.gpu.cupy_runtime", reason="CuPy is not installed: pip install cupy-cuda12x", exc_type=ImportError
)


class Driver:
    """CUDA's current device, one for each thread; a thread begins with device 0."""

    def __init__(self):
        self._thread = threading.local()
        self.chosen = []

    def current(self):
        return getattr(self._thread, "device", 0)

    def choose(self, device):
        self._thread.device = device
        self.chosen.append(device)


def on_device(device):
    driver = Driver()
    return driver, cupy_runtime.CurrentDevice(device, driver.current, driver.choose)


def test_a_thread_of_ours_takes_the_device_once_and_never_goes_back():
    """Going back to device 0 would open a context on it, in every process of a host."""
    driver, device = on_device(3)

    def own():
        device.adopt_thread()
        for _ in range(5):
            with device, device:
                assert driver.current() == 3
        assert driver.current() == 3

    thread = threading.Thread(target=own)
    thread.start()
    thread.join()
    assert driver.chosen == [3]


@pytest.mark.parametrize("theirs", [0, 1, 3])
def test_a_callers_thread_keeps_its_device(theirs):
    driver, device = on_device(3)
    driver.choose(theirs)
    driver.chosen.clear()
    with device:
        with device:
            assert driver.current() == 3
        assert driver.current() == 3
    assert driver.current() == theirs
    assert driver.chosen == ([] if theirs == 3 else [3, theirs])
    with pytest.raises(KeyError), device:
        raise KeyError
    assert driver.current() == theirs


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """NVRTC that counts what it compiles, and a cache in a folder of its own."""

    class Compiler:
        NVRTCError = RuntimeError

        def __init__(self):
            self.compiled = 0

        def getSupportedArchs(self):
            return (80, 90)

        def getVersion(self):
            return 12, 9

        def createProgram(self, *_):
            return 1

        def destroyProgram(self, program):
            return None

        def compileProgram(self, program, options):
            self.compiled += 1

        def getCUBIN(self, program):
            return b"binary %d" % self.compiled

    made = Compiler()
    monkeypatch.setattr(cupy_runtime, "nvrtc", made)
    monkeypatch.setattr(cupy_runtime, "cache_directory", lambda: str(tmp_path / "kernels"))
    cupy_runtime.usable.cache_clear()
    yield made
    cupy_runtime.usable.cache_clear()


def test_binaries_are_kept_by_architecture_and_type(compiler):
    assert [cupy_runtime.compile_for(90, 32) for _ in range(2)] == [b"binary 1"] * 2
    assert cupy_runtime.compile_for(80, 32) == b"binary 2"
    assert cupy_runtime.compile_for(90, 64) == b"binary 3"
    assert compiler.compiled == 3


@pytest.mark.parametrize("strange", ["kernels", "file"])
def test_binaries_of_somebody_else_are_not_run(compiler, monkeypatch, strange):
    assert cupy_runtime.compile_for(90, 32) == b"binary 1"
    cupy_runtime.usable.cache_clear()
    theirs = (lambda path: False) if strange == "kernels" else (lambda path: path.suffix != ".sm_90")
    monkeypatch.setattr(cupy_runtime, "is_trusted", theirs)
    monkeypatch.setattr("dgc.core.kernels.compile.is_trusted", theirs)
    assert cupy_runtime.compile_for(90, 32) == b"binary 2"


def test_a_cache_that_cannot_be_written_only_costs_time(compiler, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(cupy_runtime, "cache_directory", lambda: str(tmp_path / "file" / "kernels"))
    assert [cupy_runtime.compile_for(90, 32) for _ in range(2)] == [b"binary 1", b"binary 2"]


class Nccl(types.ModuleType):
    """CuPy's bindings as they were before version 14 (numbers in a tuple), or as they are since (bytes)."""

    available, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_SUM = True, 7, 8, 0

    def __init__(self, version):
        super().__init__("nccl")
        self.kind = tuple if version < 14 else bytes
        self.made, self.sums = [], []

    def get_unique_id(self):
        numbers = [(7 * i + 120) % 256 for i in range(128)]
        return bytes(numbers) if self.kind is bytes else tuple(n - 256 if n > 127 else n for n in numbers)

    def NcclCommunicator(self, size, identity, rank):
        if not isinstance(identity, self.kind):
            raise TypeError(f"expected {self.kind.__name__}, got {type(identity).__name__}")
        self.made.append((size, identity, rank))
        return types.SimpleNamespace(allReduce=lambda *arguments: self.sums.append(arguments))


class Runtime:
    """As much of a CupyRuntime as a group needs."""

    stream_handle = 99
    current = contextlib.nullcontext()
    new_group = cupy_runtime.CupyRuntime.new_group


@pytest.mark.parametrize("version", ["13.6.0", "14.2.0"])
def test_a_group_is_told_by_what_this_cupy_takes(version, monkeypatch):
    nccl = Nccl(int(version[:2]))
    monkeypatch.setattr(cupy_runtime, "_nccl", lambda: nccl)
    monkeypatch.setattr(cupy_runtime.cupy, "__version__", version)
    runtime = Runtime()
    group = runtime.new_group()
    assert len(group) == GROUP_BYTES
    joined = cupy_runtime.NcclGroup(runtime, group, 1, 4)
    assert nccl.made == [(4, nccl.get_unique_id(), 1)]
    for dtype, kind in ((np.float32, 7), (np.float64, 8)):
        array = types.SimpleNamespace(dtype=np.dtype(dtype), size=10, data=types.SimpleNamespace(ptr=4096))
        joined.add_up(array)
        assert nccl.sums.pop() == (4096, 4096, 10, kind, 0, 99)


def test_a_missing_nccl_is_said_with_what_to_install(monkeypatch):
    nccl = types.SimpleNamespace(available=False)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", nccl)
    monkeypatch.setattr(cupy_runtime.cupy.cuda, "nccl", nccl, raising=False)
    monkeypatch.setattr(cupy_runtime.cupy.cuda.runtime, "runtimeGetVersion", lambda: 13000)
    with pytest.raises(RuntimeError, match="CuPy finds no NCCL: pip install nvidia-nccl-cu13"):
        cupy_runtime._nccl()


def test_devices_are_told_apart_by_machine_and_bus(monkeypatch):
    monkeypatch.setattr(cupy_runtime, "_nccl", lambda: None)
    monkeypatch.setattr(cupy_runtime.cupy.cuda.runtime, "deviceGetPCIBusId", lambda device: f"0000:0{device}:00.0")
    places = set()
    for machine in ("one", "other"):
        monkeypatch.setattr(cupy_runtime.platform, "node", lambda machine=machine: machine)
        for device in (0, 1, 1):
            places.add(cupy_runtime.CupyRuntime.require_groups(types.SimpleNamespace(device=device)))
    assert len(places) == 4
    assert {len(place) for place in places} == {PLACE_BYTES}
