"""The device backend on a GPU: CuPy runs the kernels. Imports CuPy; only ``kernels.choose`` imports this module."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from cupy.cuda import nvrtc
from numpy.typing import DTypeLike

from dgc.core.kernels.base import Array
from dgc.core.kernels.compile import cache_directory, is_trusted, usable
from dgc.core.kernels.gpu.backend import DeviceKernels
from dgc.core.kernels.gpu.cuda.source import THREADS, compile_options, kernel_names, source
from dgc.core.kernels.gpu.memory import GROUP_BYTES, PLACE_BYTES

HIGHEST_PRIORITY = -100
"""Of a stream; CUDA takes the highest that there is. Its kernels are short, and what waits for them is the network."""
_ALL_ONES = 0xFF
"""Four or eight bytes of this are a NaN."""


def device_count() -> int:
    """How many devices this process sees.

    Raises:
        cupy.cuda.runtime.CUDARuntimeError: there is no driver, or it is too old.
    """
    return int(cupy.cuda.runtime.getDeviceCount())


def compile_for(capability: int, state_bits: int) -> bytes:
    """Compile the kernels: seconds, unless they are in the cache on disk.

    Not CuPy's RawModule: that always adds ``-ftz=true``, which would take denormal numbers for 0, and with them
    every float16 below 6e-5.

    Args:
        capability: of the device, such as 80.
        state_bits: 32 or 64.

    Returns:
        Machine code, or PTX for a device that this NVRTC does not know yet.

    Raises:
        RuntimeError: NVRTC refused; with its log.
    """
    newest = max(nvrtc.getSupportedArchs())
    target = f"sm_{capability}" if capability <= newest else f"compute_{newest}"
    options = (*compile_options(state_bits), f"-arch={target}")
    key = hashlib.blake2b(f"{nvrtc.getVersion()} {options} {source()}".encode(), digest_size=16).hexdigest()
    kept = Path(cache_directory()) / f"{key}.{target}"
    keeps = usable(str(kept.parent))
    # It is run as it is: like Numba's cache, nothing is taken from a folder or file that another user made.
    if keeps and kept.exists() and is_trusted(kept):
        return kept.read_bytes()
    program = nvrtc.createProgram(source(), "dgc.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        binary = nvrtc.getCUBIN(program) if target.startswith("sm_") else nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise RuntimeError(f"NVRTC {nvrtc.getVersion()} for {target}: {error}\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)
    binary = binary if isinstance(binary, bytes) else binary.encode()
    if keeps:
        with contextlib.suppress(OSError):  # compiled anew in each process, then
            draft = kept.with_suffix(f".{os.getpid()}")
            draft.write_bytes(binary)
            draft.replace(kept)
    return binary


class CurrentDevice:
    """Makes one device the current one of a thread, where that is needed.

    A thread of ours takes the device once and keeps it. Going back would be to device 0, where a thread begins, and
    with CUDA 12 that opens a context there: half a gigabyte of the first device's memory for every process of a host.
    On a caller's thread, ``with`` changes nothing if the device is current, as it is where each process has chosen its
    own, and else goes back to what was.
    """

    def __init__(self, device: int, current: Callable[[], int], choose: Callable[[int], None]) -> None:
        """Take CUDA's ``cudaGetDevice`` and ``cudaSetDevice``."""
        self._device, self._current, self._choose = device, current, choose
        self._thread = threading.local()

    def adopt_thread(self) -> None:
        """This thread is ours: it works on this device and on no other."""
        self._choose(self._device)
        self._thread.adopted = True

    def __enter__(self) -> None:
        """Be current; may be nested."""
        thread = self._thread
        if getattr(thread, "adopted", False):
            return
        before = self._current()
        if before != self._device:
            self._choose(self._device)
        thread.__dict__.setdefault("before", []).append(before)

    def __exit__(self, *_: object) -> None:
        """Be what was."""
        thread = self._thread
        if getattr(thread, "adopted", False):
            return
        before = thread.before.pop()
        if before != self._device:
            self._choose(before)


class CupyRuntime:
    """One device and one stream of our own on it; see :class:`dgc.core.kernels.gpu.memory.Runtime`.

    The stream does not wait for the default stream: who hands over memory says by events when it may be read.
    """

    name = "cupy"

    def __init__(self, device: int) -> None:
        """Take a device by its number."""
        cuda = cupy.cuda.runtime
        self.device = device
        self._device = CurrentDevice(device, cuda.getDevice, cuda.setDevice)
        with self._device:
            handle = cuda.streamCreateWithPriority(cuda.streamNonBlocking, HIGHEST_PRIORITY)
            self._stream = cupy.cuda.ExternalStream(handle, device)
        self._functions: dict[tuple[str, int], Any] = {}
        self._compiling = threading.Lock()
        self._malloc: Callable[[int], Any] = cupy.cuda.alloc

    @property
    def current(self) -> CurrentDevice:
        """Makes the device current."""
        return self._device

    @property
    def stream(self) -> Any:
        """The CuPy stream on which everything runs."""
        return self._stream

    @property
    def stream_handle(self) -> int:
        """Its CUDA handle."""
        return int(self._stream.ptr)

    def adopt_thread(self) -> None:  # noqa: D102
        self._device.adopt_thread()

    def allocate_with(self, allocate: Callable[[int, int], int], free: Callable[[int], None]) -> None:  # noqa: D102
        stream = self.stream_handle
        pool = cupy.cuda.PythonFunctionAllocator(
            lambda nbytes, _: allocate(nbytes, stream), lambda address, _: free(address)
        )
        self._malloc = pool.malloc

    def empty(self, n: int, dtype: DTypeLike) -> Array:  # noqa: D102
        # Memory is handed out for this stream: what is freed is used again only by later work of it.
        with self._device, self._stream:
            return cupy.ndarray((n,), dtype, self._malloc(max(1, n * np.dtype(dtype).itemsize)))

    def zeros(self, n: int, dtype: DTypeLike) -> Array:  # noqa: D102
        array = self.empty(n, dtype)
        self.fill(array, 0)
        return array

    def fill(self, array: Array, value: float) -> None:  # noqa: D102
        # Not CuPy's own fill, which compiles a kernel when it is first called: in the first refused step, that is.
        if value != 0 and value == value:
            raise ValueError(f"memory is filled with 0 or NaN, not {value}")
        if array.size:
            with self._device:
                byte = 0 if value == value else _ALL_ONES
                cupy.cuda.runtime.memsetAsync(array.data.ptr, byte, array.nbytes, self._stream.ptr)

    def host_array(self, n: int, dtype: DTypeLike) -> np.ndarray:  # noqa: D102
        nbytes = n * np.dtype(dtype).itemsize
        if nbytes == 0:
            return np.empty(0, dtype)
        with self._device:
            memory = cupy.cuda.alloc_pinned_memory(nbytes)
        array: np.ndarray = np.frombuffer(memory, np.uint8, nbytes).view(dtype)
        array[...] = 0
        return array

    def address(self, array: Array) -> int:  # noqa: D102
        return int(array.data.ptr)

    def view(self, address: int, n: int, dtype: DTypeLike, owner: object) -> Array:  # noqa: D102
        if n == 0:
            return self.empty(0, dtype)
        memory = cupy.cuda.UnownedMemory(address, n * np.dtype(dtype).itemsize, owner, self.device)
        return cupy.ndarray((n,), dtype, cupy.cuda.MemoryPointer(memory, 0))

    def upload(self, device: Array, host: np.ndarray) -> None:  # noqa: D102
        kind = cupy.cuda.runtime.memcpyHostToDevice
        with self._device:
            cupy.cuda.runtime.memcpyAsync(device.data.ptr, host.ctypes.data, host.nbytes, kind, self._stream.ptr)

    def download(self, host: np.ndarray, device: Array) -> None:  # noqa: D102
        kind = cupy.cuda.runtime.memcpyDeviceToHost
        with self._device:
            cupy.cuda.runtime.memcpyAsync(host.ctypes.data, device.data.ptr, host.nbytes, kind, self._stream.ptr)

    def copy(self, array: Array, source: Array) -> None:  # noqa: D102
        kind = cupy.cuda.runtime.memcpyDeviceToDevice
        with self._device:
            cupy.cuda.runtime.memcpyAsync(array.data.ptr, source.data.ptr, source.nbytes, kind, self._stream.ptr)

    def launch(self, name: str, state_bits: int, grid: int, arguments: Sequence[Any]) -> None:  # noqa: D102
        function = self._functions.get((name, state_bits))
        if function is None:
            self.compile(state_bits)
            function = self._functions[name, state_bits]
        # One address space: a kernel knows page-locked memory by the address that the host knows it by.
        given = tuple(np.uint64(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in arguments)
        with self._device:
            function((grid, 1, 1), (THREADS, 1, 1), given, 0, self._stream)

    def record(self) -> Any:  # noqa: D102
        with self._device:
            # One that blocks: a thread that spins would take a core from the data loader.
            event = cupy.cuda.Event(block=True, disable_timing=True)
            event.record(self._stream)
        return event

    def synchronize(self, event: Any) -> None:  # noqa: D102
        event.synchronize()

    def wait_for(self, event: int) -> None:  # noqa: D102
        with self._device:
            cupy.cuda.runtime.streamWaitEvent(self._stream.ptr, event)

    def release_to(self, stream: int) -> None:  # noqa: D102
        event = self.record()
        with self._device:
            cupy.cuda.runtime.streamWaitEvent(stream, event.ptr)

    def require_groups(self) -> bytes:  # noqa: D102
        _nccl()
        place = f"{platform.node()} {cupy.cuda.runtime.deviceGetPCIBusId(self.device)}"
        return hashlib.blake2b(place.encode(), digest_size=PLACE_BYTES).digest()

    def new_group(self) -> bytes:  # noqa: D102
        identity = _nccl().get_unique_id()
        if isinstance(identity, bytes):
            return identity.ljust(GROUP_BYTES, b"\0")
        return np.array(identity, np.int16).tobytes()  # of C's char, which has a sign on some machines

    def join(self, group: bytes, rank: int, size: int) -> NcclGroup:  # noqa: D102
        return NcclGroup(self, group, rank, size)

    def compile(self, state_bits: int) -> None:
        """Compile all kernels for state of one width, or load them from the cache on disk; seconds when cold."""
        with self._compiling, self._device:
            if (kernel_names()[0], state_bits) in self._functions:
                return
            module = cupy.cuda.function.Module()
            module.load(compile_for(int(cupy.cuda.Device(self.device).compute_capability), state_bits))
            functions = {(name, state_bits): module.get_function(f"dgc_{name}") for name in kernel_names()}
            self._functions.update(functions)


class NcclGroup:
    """Devices that add up by NCCL, on the runtimes' own streams; see :class:`dgc.core.kernels.gpu.memory.Joined`.

    NCCL finishes each element on one device and hands it to the others, so all have the same bits.
    """

    def __init__(self, runtime: CupyRuntime, group: bytes, rank: int, size: int) -> None:
        """Connect: see :meth:`dgc.core.kernels.gpu.memory.Runtime.join`."""
        self._nccl, self._runtime = _nccl(), runtime
        with runtime.current:
            # A tuple of numbers before CuPy 14, bytes since.
            old = int(cupy.__version__.partition(".")[0]) < 14
            identity = tuple(np.frombuffer(group, np.int16).tolist()) if old else group[: GROUP_BYTES // 2]
            self._communicator = self._nccl.NcclCommunicator(size, identity, rank)

    def add_up(self, array: Array) -> None:  # noqa: D102
        kind = self._nccl.NCCL_FLOAT64 if array.dtype == np.float64 else self._nccl.NCCL_FLOAT32
        address, runtime = int(array.data.ptr), self._runtime
        with runtime.current:
            self._communicator.allReduce(address, address, array.size, kind, self._nccl.NCCL_SUM, runtime.stream_handle)


def _nccl() -> Any:
    """CuPy's bindings to NCCL.

    Raises:
        RuntimeError: there is no NCCL that they could load.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is missing is said here, once
        from cupy.cuda import nccl
    if not nccl.available:
        major = cupy.cuda.runtime.runtimeGetVersion() // 1000
        raise RuntimeError(f"CuPy finds no NCCL: pip install nvidia-nccl-cu{major}")
    return nccl


class CupyKernels(DeviceKernels):
    """The device backend on one GPU. Compiled at construction, so that no step waits for the compiler.

    Both types of state are: the first bucket of float64 may come late, and a kernel is loaded when it first runs.
    """

    def __init__(self, device: int = 0, *, warm_up: bool = True) -> None:
        """Compile the kernels, and run each once.

        Args:
            device: number of the device, as CUDA counts.
            warm_up: False leaves compilation to the first use.

        Raises:
            cupy.cuda.runtime.CUDARuntimeError: there is no such device.
        """
        runtime = CupyRuntime(device)
        super().__init__(runtime)
        self.device = device
        if warm_up:
            for dtype in ("float32", "float64"):
                self.warm_up(dtype)

    def describe(self) -> str:
        """One line for a log: what runs where."""
        properties = cupy.cuda.runtime.getDeviceProperties(self.device)
        return f"cupy {cupy.__version__} on device {self.device} ({properties['name'].decode()})"
