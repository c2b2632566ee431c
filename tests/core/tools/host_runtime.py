"""The device backend's runtime on a processor: NumPy arrays for memory, the kernels' own text compiled by g++."""

from __future__ import annotations

import collections
import ctypes
import functools
import hashlib
import os
import secrets
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

import numpy as np

from dgc.core.kernels.gpu.cuda.source import THREADS, kernel_names, source
from dgc.core.kernels.gpu.memory import GROUP_BYTES, PLACE_BYTES

SHIM = Path(__file__).with_name("host_cuda.h")

_compiling = threading.Lock()
"""Ranks are threads here, and each asks for the library; one of them compiles it."""


def compiler():
    return shutil.which(os.environ.get("CXX", "g++"))


@cache
def _compiler_version():
    return subprocess.run([compiler(), "-v"], check=True, capture_output=True, text=True).stderr


@cache
def library(state_bits, text=None):
    """Compile the sources (or ``text`` in their place) for the processor; kept between runs by content."""
    entries = "\n".join(
        f'extern "C" void run_{name}(unsigned grid, unsigned block, void** arguments, unsigned seed) '
        f"{{ host::launch(dgc_{name}, grid, block, arguments, seed); }}"
        for name in kernel_names()
    )
    begin = f"#include <algorithm>\n#define STATE_BITS {state_bits}\n"
    whole = "\n".join([begin, SHIM.read_text(), text or source(), entries, ""])
    folder = Path(tempfile.gettempdir()) / f"dgc-host-kernels-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    built = folder / f"{hashlib.blake2b((_compiler_version() + whole).encode(), digest_size=12).hexdigest()}.so"
    with _compiling:
        if not built.exists():
            _compile(whole, built)
    return ctypes.CDLL(str(built))


def _compile(text, built):
    # Other processes may be at it too: each works in a folder of its own, and what they put in place is the same.
    with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
        unit, draft = Path(scratch) / "kernels.cpp", Path(scratch) / "kernels.so"
        unit.write_text(text)
        subprocess.run(
            [compiler(), "-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-fno-strict-aliasing",
             "-U_FORTIFY_SOURCE", str(unit), "-o", str(draft)],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        draft.replace(built)


class Meeting:
    """Where the ranks of a group hand over what they add up; broken when one of them does not come."""

    def __init__(self, size):
        self.arrays = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)


_meetings = {}


class HostGroup:
    """What NCCL does, done by whoever runs the queues: like its kernels, it waits for the others when it runs."""

    def __init__(self, runtime, meeting, rank):
        self.runtime = runtime
        self.meeting = meeting
        self.rank = rank

    def add_up(self, array):
        self.runtime.operations.append("add up")
        self.runtime._enqueue(lambda: self._meet(array))

    def _meet(self, array):
        meeting = self.meeting
        meeting.arrays[self.rank] = array.copy()
        meeting.barrier.wait()
        total = functools.reduce(np.add, meeting.arrays)
        meeting.barrier.wait()
        array[...] = total


class HostRuntime:
    """What a device does, done by the processor.

    Args:
        seed: other than 0 shuffles the order of blocks and of threads.
        deferred: do nothing before somebody waits, the latest that a device may be: whoever reads results too early, or
            overwrites what was to be copied, gets wrong numbers.
        text: kernels in place of the sources.
        groups: devices can add up together, as by NCCL. Ranks are threads.

    Memory that nobody wrote is filled with a pattern, so that reading it shows. Counts waits and launches;
    ``operations`` names all that a driver would be called for in a step: launches, copies, events and waits.
    """

    name = "host"
    stream_handle = 55

    def __init__(self, seed=0, *, deferred=False, text=None, groups=False):
        self.seed = seed
        self.deferred = deferred
        self.waits = 0
        self.launches = []
        self.operations = []
        self.waited_for = []
        self.released_to = []
        self.owners = []
        self.kernels = set()
        self.threads = []
        self.allocators = []
        self._text = text
        self._groups = groups
        self.place = None
        self._queue = collections.deque()
        self._done = 0
        self._lock = threading.RLock()

    def adopt_thread(self):
        self.threads.append(threading.current_thread().name)

    def allocate_with(self, allocate, free):
        self.allocators.append((allocate, free))

    def empty(self, n, dtype):
        array = np.empty(n, dtype)
        array.view(np.uint8)[...] = 0xA5
        return array

    def zeros(self, n, dtype):
        return np.zeros(n, dtype)

    def host_array(self, n, dtype):
        return np.zeros(n, dtype)

    def address(self, array):
        return array.ctypes.data

    def view(self, address, n, dtype, owner):
        if n == 0:
            return np.empty(0, dtype)
        memory = (ctypes.c_uint8 * (n * np.dtype(dtype).itemsize)).from_address(address)
        self.owners.append(owner)
        return np.frombuffer(memory, dtype)

    def fill(self, array, value):
        self.operations.append("fill")
        assert value == 0 or value != value, "memory is filled with 0 or NaN"
        self._enqueue(lambda: array.fill(value))

    def upload(self, device, host):
        self.operations.append("upload")
        self._copy(device, host)

    def download(self, host, device):
        self.operations.append("download")
        self._copy(host, device)

    def copy(self, array, source):
        self.operations.append("copy")
        self._copy(array, source)

    def launch(self, name, state_bits, grid, arguments):
        assert grid >= 1
        self.launches.append(name)
        self.operations.append(name)
        self.kernels.add((name, state_bits))
        arguments = list(arguments)
        self._enqueue(lambda: self._run(name, state_bits, grid, arguments))

    def record(self):
        self.operations.append("record")
        return self._enqueued()

    def _enqueued(self):
        with self._lock:
            return self._done + len(self._queue)

    def synchronize(self, event):
        self.waits += 1
        self.operations.append("wait")
        self._flush(event)

    def wait_for(self, event):
        self.operations.append("wait for an event")
        self.waited_for.append(event)

    def release_to(self, stream):
        self.operations += ["record", "let a stream wait"]
        self.released_to.append(stream)
        self._flush(self._enqueued())

    def require_groups(self):
        if not self._groups:
            raise RuntimeError("no NCCL here")
        return (self.place or id(self)).to_bytes(PLACE_BYTES, "little")

    def new_group(self):
        return secrets.token_bytes(GROUP_BYTES)

    def join(self, group, rank, size):
        with _compiling:
            meeting = _meetings.setdefault(group, Meeting(size))
        meeting.barrier.wait()  # NCCL waits for all of them, too
        return HostGroup(self, meeting, rank)

    def _copy(self, to, source):
        assert to.dtype == source.dtype
        assert to.shape == source.shape

        def copy():
            to[...] = source

        self._enqueue(copy)

    def _enqueue(self, work):
        with self._lock:
            self._queue.append(work)
            if not self.deferred:
                self._flush(self._enqueued())

    def _flush(self, event):
        with self._lock:
            while self._done < event:
                self._queue.popleft()()
                self._done += 1

    def _run(self, name, state_bits, grid, arguments):
        boxes = [
            ctypes.c_void_p(a.ctypes.data)
            if isinstance(a, np.ndarray)
            else ctypes.create_string_buffer(a.tobytes(), a.nbytes)
            for a in arguments
        ]
        pointers = (ctypes.c_void_p * len(boxes))(*[ctypes.addressof(b) for b in boxes])
        getattr(library(state_bits, self._text), f"run_{name}")(
            ctypes.c_uint(grid), ctypes.c_uint(THREADS), pointers, ctypes.c_uint(self.seed)
        )
