"""A device on a processor: the kernels' own texts compiled by g++, and arrays that only a device's functions can touch.

As with CuPy, an array turns into one of NumPy's by no accident. A copy to the host arrives when an event behind it is
waited for. What must not happen on a device fails: a launch on another stream, a page-locked source that changes before
its copy has run, an access outside an array's memory, a wait that nobody asked for.
"""

import collections
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dgc.core.kernels.device import Device, DeviceKernels

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler (g++) for the kernels' texts")

counts = collections.Counter()
"""Launches, copies and waits, of all devices."""
launched = {}
"""By kernel and element type, what it was given when it was last launched, as CuPy sees it."""

_on = threading.local()  # how often this thread has made a device current
_GUARD = 256  # bytes around an array that nobody may write
_COLOUR = 0xA5


def _launch(name):
    assert getattr(_on, "depth", 0) > 0, f"{name} would run on the default stream"
    counts["launch"] += 1
    counts[name] += 1


class ndarray:
    """A device array: nothing of NumPy takes it."""

    __array_ufunc__ = None
    __slots__ = ("_a", "_memory", "_owner")

    def __init__(self, a, memory=None, owner=None):
        assert type(a) is np.ndarray, type(a)
        self._a, self._memory, self._owner = a, memory, owner

    def __array__(self, *_, **__):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_function__(self, *_):
        raise TypeError("NumPy functions do not take device arrays")

    dtype = property(lambda self: self._a.dtype)
    size = property(lambda self: self._a.size)
    shape = property(lambda self: self._a.shape)
    ndim = property(lambda self: self._a.ndim)
    nbytes = property(lambda self: self._a.nbytes)
    flags = property(lambda self: self._a.flags)
    data = property(lambda self: SimpleNamespace(ptr=self._a.ctypes.data))

    def __getitem__(self, key):
        assert isinstance(key, slice)
        return ndarray(self._a[key], self._memory, self._owner)

    def __setitem__(self, key, value):
        assert key is Ellipsis
        _launch("copy")
        self._a[...] = value._a

    def __imul__(self, other):
        _launch("multiply")
        with np.errstate(over="ignore"):
            self._a *= other._a
        return self

    def __bool__(self):
        raise AssertionError("a wait that nobody asked for")

    __int__ = __float__ = __index__ = __iter__ = __bool__

    def fill(self, value):
        _launch("fill")
        self._a.fill(value)

    def view(self, dtype):
        return ndarray(self._a.view(dtype), self._memory, self._owner)

    def sum(self):
        _launch("sum")
        return ndarray(np.array([self._a.sum()]))

    def require_guards(self, name):
        """Nobody has written outside its memory."""
        if self._memory is not None:
            edges = np.concatenate([self._memory[:_GUARD], self._memory[-_GUARD:]])
            assert (edges == _COLOUR).all(), f"{name} wrote outside an array"


class Namespace:
    """What the kernels use of CuPy."""

    def empty(self, n, dtype):
        nbytes = n * np.dtype(dtype).itemsize
        memory = np.full(nbytes + 2 * _GUARD, _COLOUR, np.uint8)
        return ndarray(memory[_GUARD : _GUARD + nbytes].view(dtype), memory)

    def zeros(self, n, dtype):
        array = self.empty(n, dtype)
        array.fill(0)
        return array

    def asarray(self, host):
        assert type(host) is np.ndarray
        assert getattr(_on, "depth", 0) > 0, "a copy on the default stream"
        counts["to device"] += 1
        array = self.empty(host.size, host.dtype)
        array._a[...] = host
        return array

    def isfinite(self, x):
        _launch("isfinite")
        return ndarray(np.isfinite(x._a))

    def where(self, condition, a, b):
        _launch("where")
        return ndarray(np.where(condition._a, a._a, b))

    def stack(self, arrays):
        _launch("stack")
        return ndarray(np.concatenate([a._a for a in arrays]))

    def ElementwiseKernel(self, *arguments, **options):
        return Kernel(*arguments, **options)


class Event:
    def __init__(self, queue, stop):
        self._queue, self._stop = queue, stop

    def synchronize(self):
        """Let arrive what was enqueued before it."""
        counts["wait"] += 1
        with self._queue.lock:
            while self._queue.done < self._stop:
                self._queue.items.popleft()()
                self._queue.done += 1


class Queue:
    def __init__(self):
        self.items, self.done, self.lock = collections.deque(), 0, threading.RLock()

    def add(self, item):
        with self.lock:
            self.items.append(item)

    def event(self):
        with self.lock:
            return Event(self, self.done + len(self.items))


class FakeDevice(Device):
    """A device whose memory is the host's."""

    xp, name, stream = Namespace(), "fake", 99

    def __init__(self):
        self.waited_for, self.released_to, self.allocators, self.adopted = [], [], [], 0
        self._queue, self._locked = Queue(), []

    def __enter__(self):
        _on.depth = getattr(_on, "depth", 0) + 1

    def __exit__(self, *_):
        _on.depth -= 1

    def adopt_thread(self):
        self.adopted += 1

    def allocate_with(self, allocate, free):
        self.allocators.append((allocate, free))

    def host_array(self, n, dtype):
        array = np.empty(n, dtype)
        array.view(np.uint8)[...] = _COLOUR
        return array

    def view(self, address, n, dtype, owner):
        kind = np.dtype(dtype)
        array = np.empty(0, kind)
        if n:
            array = np.frombuffer((ctypes.c_char * (n * kind.itemsize)).from_address(address), kind)
        return ndarray(array, None, owner)

    def upload(self, array, host):
        counts["to device"] += 1
        array._a[...] = host
        before = host.tobytes()

        def check():
            assert host.tobytes() == before, "page-locked memory was overwritten before its copy had run"

        self._queue.add(check)

    def fetch(self, array, host):
        counts["to host"] += 1
        counts["bytes to host"] += host.nbytes
        assert (array.dtype, array.shape) == (host.dtype, host.shape)
        taken = array._a.copy()
        self._queue.add(lambda: host.__setitem__(Ellipsis, taken))

    def record(self):
        return self._queue.event()

    def wait_for(self, event):
        self.waited_for.append(event)

    def release_to(self, stream):
        self.released_to.append(stream)


def fake_kernels():
    return DeviceKernels(FakeDevice())


def device(array):
    """The same memory as a device array."""
    return ndarray(np.asarray(array))


def host(array):
    """And back."""
    return array._a if isinstance(array, ndarray) else array


# -- element-wise kernels ----------------------------------------------------------------------------------------------

_C = {"float32": "float", "float64": "double", "uint8": "unsigned char", "int32": "int", "int64": "long long",
      "bool": "bool"}  # fmt: skip
_SHIM = """
#include <cmath>
#include <cstring>
#include <cstddef>
using std::isfinite; using std::fabs;
#define __device__
#define __forceinline__ inline
static inline float __int_as_float(int i) { float f; memcpy(&f, &i, 4); return f; }
static inline int atomicAdd(int* p, int n) { return __atomic_fetch_add(p, n, __ATOMIC_RELAXED); }
template <class T> struct Raw { T* p; T& operator[](ptrdiff_t i) const { return p[i]; } };
"""
_STRIDE = 7919  # a prime: elements run in another order than they lie
_compiling = threading.Lock()


@cache
def _built(text):
    folder = Path(tempfile.gettempdir()) / f"dgc-fake-device-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    built = folder / (hashlib.blake2b(text.encode(), digest_size=12).hexdigest() + ".so")
    if not built.exists():
        unit, draft = built.with_suffix(f".{os.getpid()}.cpp"), built.with_suffix(f".{os.getpid()}")
        unit.write_text(text)
        command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-fno-strict-aliasing"]
        subprocess.run([*command, str(unit), "-o", str(draft)], check=True)
        draft.replace(built)
    return ctypes.CDLL(str(built))


class Kernel:
    """In place of ``cupy.ElementwiseKernel``, as strict as that."""

    def __init__(self, in_params, out_params, operation, name="kernel", preamble="", options=()):
        assert options == ("--fmad=false",)
        self.inputs = in_params.count(",") + 1
        self.parameters = [p.split() for p in f"{in_params},{out_params}".split(",")]
        self.operation, self.name, self.preamble = operation, name, preamble

    def __call__(self, *arguments, size=None):
        assert len(arguments) == len(self.parameters), self.name
        # The type of T is that of arrays; a number has none of its own.
        kinds = {a.dtype.name for (*_, t, _), a in zip(self.parameters, arguments, strict=True)
                 if t == "T" and isinstance(a, ndarray)}  # fmt: skip
        assert len(kinds) == 1, (self.name, kinds)
        kind = kinds.pop()
        sizes, declared, inner, boxes = set(), [], [], []
        for place, ((*raw, t, name), a) in enumerate(zip(self.parameters, arguments, strict=True)):
            c_type, is_array = _C[kind if t == "T" else t], isinstance(a, ndarray)
            const = "const " if place < self.inputs else ""
            if is_array:
                assert a._a.flags.c_contiguous
                assert a.dtype.name == (kind if t == "T" else t), (self.name, name, a.dtype)
                boxes.append(ctypes.c_void_p(a._a.ctypes.data))
            else:
                assert not raw, (self.name, name, type(a))
                assert not isinstance(a, np.ndarray), "a NumPy array among a kernel's arguments"
                assert t != "T"
                boxes.append(ctypes.c_char_p(np.array(a, t).tobytes()))
            if raw:
                declared.append(f"Raw<{c_type}> {name}{{({c_type}*)a[{place}]}};")
            elif is_array:
                sizes.add(a.size)
                inner.append(f"{const}{c_type}& {name} = (({c_type}*)a[{place}])[i];")
            else:
                declared.append(f"const {c_type} {name} = *({c_type}*)a[{place}];")
        if size is None:
            assert len(sizes) == 1, (self.name, sizes)
            size = sizes.pop()
        else:
            assert not sizes, "CuPy takes a size only where all arrays are raw"
        launched[self.name, kind] = arguments
        if not size:
            return
        _launch(self.name)
        text = f"""{_SHIM} {self.preamble}
extern "C" void run(ptrdiff_t n, void** a) {{ typedef {_C[kind]} T; {" ".join(declared)}
const ptrdiff_t stride = n % {_STRIDE} ? {_STRIDE} : 1;
for (ptrdiff_t t = 0; t < n; ++t) {{ ptrdiff_t i = t * stride % n; {" ".join(inner)} {self.operation}; }} }}"""
        with _compiling:
            run = _built(text).run
        run(ctypes.c_ssize_t(size), (ctypes.c_void_p * len(boxes))(*[ctypes.cast(b, ctypes.c_void_p) for b in boxes]))
        for a in arguments:
            if isinstance(a, ndarray):
                a.require_guards(self.name)
