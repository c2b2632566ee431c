"""Several threads in a kernel, several Python threads calling kernels, and who decides how many."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from kernel_tools import LAUNCHER_VARIABLES, Pieces, check_selection, run_script

from dgc.core.kernels import threads as threads_module
from dgc.core.kernels.base import SegmentWork
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.kernels.threads import Team, Work, available_cores, default_threads
from dgc.core.kernels.threshold import new_thresholds
from dgc.errors import ConfigError


@pytest.fixture
def bare_environment(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_python_threads_call_kernels_at_once():
    kernels, reference = NumbaKernels(2), ReferenceKernels()
    lengths, offsets = [100_000, 5000, 300_000], [0, 100_000, 105_000]
    start = threading.Barrier(3)

    def train(seed):
        rng = np.random.default_rng(seed)
        u, v, expected_u, expected_v = np.zeros((4, 405_000), np.float32)
        thresholds = new_thresholds(3)
        start.wait()
        for _ in range(15):
            work = [
                SegmentWork(rng.standard_normal(n).astype(np.float32), None, o, n, n // 500, 0.9)
                for n, o in zip(lengths, offsets, strict=True)
            ]
            chosen = kernels.accumulate_and_select(work, u, v, thresholds)
            reference.accumulate(work, expected_u, expected_v)
            np.testing.assert_array_equal(u, expected_u)
            np.testing.assert_array_equal(v, expected_v)
            for w in work:
                inside = chosen.positions[(chosen.positions >= w.offset) & (chosen.positions < w.offset + w.length)]
                check_selection(v[w.offset : w.offset + w.length], w, inside)
            for own_u, own_v in ((u, v), (expected_u, expected_v)):
                kernels.take_out(own_u, own_v, chosen.positions, chosen.values, masking=True)
            kernels.sums_of_squares([u, v])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(train, range(3)))


def test_a_fork_while_another_thread_is_inside_a_kernel():
    done = run_script(
        """
        import os, threading
        import numpy as np
        from dgc.core.kernels.cpu import NumbaKernels
        kernels, v = NumbaKernels(2), np.ones(3_000_000, np.float32)
        kernels.sums_of_squares([v])
        stop, calls = threading.Event(), []

        def work():
            while not stop.is_set():
                assert kernels.sums_of_squares([v])[0] == v.size
                calls.append(1)

        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(20):
            before = len(calls)
            child = os.fork()
            if child == 0:
                os._exit(0 if all(kernels.sums_of_squares([v])[0] == v.size for _ in range(5)) else 1)
            assert os.waitpid(child, 0)[1] == 0
            while len(calls) == before and thread.is_alive():  # the parent's team goes on
                pass
        stop.set()
        thread.join()
        assert len(calls) >= 20
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_dropped_backend_leaves_no_thread():
    before = set(threading.enumerate())
    kernels = NumbaKernels(2)
    kernels.sums_of_squares([np.ones(3_000_000, np.float32)])
    (helper,) = set(threading.enumerate()) - before
    del kernels
    gc.collect()
    helper.join(300)
    assert not helper.is_alive()


def test_threads_are_the_share_of_the_host(bare_environment):
    assert default_threads() == available_cores()
    for ranks, threads in ((1000, 1), (2, max(1, available_cores() // 2)), (available_cores(), 1)):
        bare_environment.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", str(ranks))
        assert default_threads() == threads
    bare_environment.setenv("HOROVOD_LOCAL_SIZE", "1")
    assert default_threads() == available_cores()
    bare_environment.setenv(threads_module.THREADS_VARIABLE, "7")
    assert default_threads() == 7


@pytest.mark.parametrize("value", ["0", "two", "-1", ""])
def test_a_wrong_number_of_threads_is_an_error(bare_environment, value):
    bare_environment.setenv(threads_module.THREADS_VARIABLE, value)
    with pytest.raises(ConfigError, match="whole number"):
        NumbaKernels()


def test_there_is_at_least_one_thread(bare_environment):
    assert NumbaKernels(3).threads == 3
    assert NumbaKernels(0).threads == 1


@pytest.mark.parametrize("worker", [0, 1])
def test_a_kernel_that_fails_on_any_thread_fails_the_call_and_leaves_nothing_running(worker):
    team, kernel = Team(), Pieces()
    for _ in range(3):
        with pytest.raises(MemoryError, match="no room"):
            team.run(2, kernel, 10, worker)
        assert not kernel.working
    team.run(2, kernel, 10, None)


def test_an_interrupt_waits_for_the_pieces_under_way():
    done = run_script(
        """
    import os, signal, threading, time
    import numpy as np
    from dgc.core.kernels.threads import Team
    from kernel_tools import Pieces

    # A shell that starts jobs in the background lets them ignore this signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    team, kernel, interrupted = Team(), Pieces(), 0
    team.run(2, kernel, 10, None)  # what is compiled is compiled now: LLVM's callbacks would swallow an interrupt
    for delay in np.linspace(0.01, 0.3, 12):
        try:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
            team.run(2, kernel, 10, None)
            for _ in range(3000):  # the signal may come late, and to another thread, which does not end a sleep
                time.sleep(0.01)
        except KeyboardInterrupt:
            interrupted += 1
        # The interrupt may have hit this thread's own piece, which then stays in the list; a helper's may not.
        before = list(kernel.working)
        time.sleep(0.1)
        assert kernel.working == before, (kernel.working, before)
        kernel.working.clear()
    assert interrupted == 12, interrupted
    """
    )
    assert done.returncode == 0, done.stderr


def test_with_no_more_threads_the_caller_works_alone(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads_module.Thread, "start", refuse)
    v = np.ones(3_000_000, np.float32)
    assert NumbaKernels(2).sums_of_squares([v])[0] == v.size


def test_an_interrupt_before_the_calling_thread_begins_leaves_nobody_at_work(monkeypatch):
    inside, go_on, left = threading.Event(), threading.Event(), threading.Event()

    def kernel(worker, progress, pieces):
        inside.set()
        assert go_on.wait(300)
        left.set()

    def finish(self):
        assert inside.wait(300)
        threading.Timer(0.2, go_on.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(Work, "finish", finish)
    with pytest.raises(KeyboardInterrupt):
        Team().run(2, kernel, 2)
    assert left.is_set()
