"""How a process ends that was forked from a rank: as it would have, but without what belongs to its parent."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import atexit, ctypes, os, sys, types
from fakes import FakeHorovod

class Basics:
    def init(self):
        atexit.register(self.shutdown)

    def shutdown(self):
        print("Horovod waits for its thread", flush=True)

libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)  # what a library leaves there for the end
horovod = FakeHorovod()
horovod.hvd.init = Basics().init
horovod.hvd.__name__ = "horovod.frame"
horovod.hvd.init()
horovod.require_ready()
horovod.require_ready()  # every constructor does
{before}
child = os.fork()
if child == 0:
    atexit.register(print, "a handler of Python's")
    libc.puts(b"the C library's buffer")
    {end}
ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print("the child ended with", ended, flush=True)
os._exit(0)
"""

LINES = ["a handler of Python's", "the C library's buffer"]


def lines_of(**parts):
    here = Path(__file__).parent
    found = f"import sys\nsys.path[:0] = [{str(here.parents[1])!r}, {str(here)!r}]\n"
    source = found + RANK.format(**{"before": "", **parts})
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


needs_on_exit = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "on_exit"), reason="the C library has no on_exit()"
)


@needs_on_exit
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("sys.exit(7)", 7),
        ("sys.exit()", 0),
        ("sys.exit('an error')", 1),
        ("raise ValueError('an error')", 1),
        ("libc.exit(300)", 300 % 256),
    ],
)
def test_a_child_ends_without_its_parents_destructors(end, status):
    found = lines_of(end=end)
    wanted = LINES[1:] if end.startswith("libc") else LINES  # C's exit() knows nothing of Python's handlers
    assert sorted(found) == sorted([*wanted, f"the child ended with {status}"])


@needs_on_exit
def test_what_a_child_registers_itself_still_runs():
    child = (
        "libc.strdup.restype = ctypes.c_void_p; "
        "libc.__cxa_atexit(libc.puts, ctypes.c_void_p(libc.strdup(b'of its own')), None); "
        "sys.exit(3)"
    )
    assert sorted(lines_of(end=child)) == sorted([*LINES, "of its own", "the child ended with 3"])


@needs_on_exit
def test_a_child_of_a_child_ends_as_one():
    child = "own = os.fork(); sys.exit(4 if own == 0 else 5 * os.waitstatus_to_exitcode(os.waitpid(own, 0)[1]))"
    assert lines_of(end=child)[-1] == "the child ended with 20"


def test_a_child_of_multiprocessing_ends_as_ever():
    before = (
        "import multiprocessing\n"
        "worker = multiprocessing.get_context('fork').Process(target=sys.exit, args=(6,))\n"
        "worker.start(); worker.join(); print('a worker ended with', worker.exitcode, flush=True)"
    )
    assert lines_of(before=before, end="sys.exit(7)")[0] == "a worker ended with 6"
