"""Several threads in a kernel, several Python threads calling kernels, and who decides how many."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from kernel_tools import offsets_of

from dgc.core.kernels.base import SegmentWork
from dgc.core.kernels.cpu import threads as threads_module
from dgc.core.kernels.cpu.backend import NumbaKernels
from dgc.core.kernels.cpu.threads import available_cores, default_threads
from dgc.errors import ConfigError

ROOT = Path(__file__).parents[3]

LAUNCHER_VARIABLES = (threads_module.THREADS_VARIABLE, *threads_module.LOCAL_SIZE_VARIABLES)


@pytest.fixture
def bare_environment(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def run_script(text, **environment):
    """Run Python code in a process of its own."""
    env = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES and not k.startswith("NUMBA_")}
    paths = [str(ROOT), str(ROOT / "tests/core")]
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={**env, "PYTHONPATH": os.pathsep.join(paths), **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


CONCURRENT = """
    import threading, sys
    import numpy as np
    from dgc.core.kernels.base import SegmentWork
    from dgc.core.kernels.cpu.backend import NumbaKernels
    from dgc.core.kernels.reference import ReferenceKernels

    kernels, reference = NumbaKernels(2), ReferenceKernels()
    kernels.warm_up()
    failures, start = [], threading.Barrier(3)

    def train(seed):
        rng = np.random.default_rng(seed)
        lengths = [100_000, 5000, 300_000]
        offsets = np.cumsum([0, *lengths])
        u, v = np.zeros(offsets[-1], np.float32), np.zeros(offsets[-1], np.float32)
        expected_u, expected_v = u.copy(), v.copy()
        control = kernels.new_control(3)
        start.wait()
        for step in range(15):
            work = [SegmentWork(rng.standard_normal(n).astype(np.float32), None, int(o), n, n // 500, 0.9)
                    for n, o in zip(lengths, offsets)]
            chosen = kernels.accumulate_and_select(work, u, v, control)
            expected = reference.accumulate_and_select(work, expected_u, expected_v, control)
            if not (np.array_equal(u, expected_u) and np.array_equal(v, expected_v)
                    and np.array_equal(chosen.positions, expected.positions)):
                failures.append((seed, step))
            for own_u, own_v in ((u, v), (expected_u, expected_v)):
                kernels.mask(own_u, own_v, chosen.positions, chosen.values, masking=True)
            kernels.sums_of_squares([u, v])

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(3)]
    for t in threads: t.start()
    for t in threads: t.join()
    print(kernels.describe())
    sys.exit(f"wrong steps: {failures}" if failures else 0)
"""


def test_python_threads_call_kernels_at_once():
    done = run_script(CONCURRENT)
    assert done.returncode == 0, done.stderr
    assert "2 threads" in done.stdout


def test_after_a_fork_the_child_has_a_team_of_its_own():
    done = run_script(
        """
        import os
        import numpy as np
        from dgc.core.kernels.cpu.backend import NumbaKernels
        kernels, v = NumbaKernels(2), np.ones(3_000_000, np.float32)
        assert kernels.sums_of_squares([v])[0] == v.size
        child = os.fork()
        if child == 0:
            os._exit(0 if kernels.sums_of_squares([v])[0] == v.size else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert kernels.sums_of_squares([v])[0] == v.size
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_fork_while_another_thread_is_inside_a_kernel():
    done = run_script(
        """
        import os, threading
        import numpy as np
        from dgc.core.kernels.cpu.backend import NumbaKernels
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


FROM_THE_CACHE = """
    import sys
    import numpy as np
    from dgc.core.kernels.cpu import dense, scatter
    from dgc.core.kernels.cpu.backend import NumbaKernels
    kernels, v = NumbaKernels(2), np.arange(300_000, dtype=np.float32)
    assert kernels.take(v, np.array([3, 299_999])).tolist() == [3, 299_999]
    assert kernels.sums_of_squares([np.ones_like(v)])[0] == v.size
    stats = [f.stats for f in (dense.tile_sums, dense.add_tiles, scatter.gather)]
    print(sum(sum(s.cache_hits.values()) for s in stats), sum(sum(s.cache_misses.values()) for s in stats))
"""


@pytest.mark.timeout(1500)
def test_processes_that_meet_an_empty_cache_at_once_fill_it(tmp_path):
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: run_script(FROM_THE_CACHE, **cache), range(2)))
    assert [d.returncode for d in both] == [0, 0], [d.stderr for d in both]
    later = run_script(FROM_THE_CACHE, **cache)
    assert later.returncode == 0, later.stderr
    assert later.stdout.split() == ["3", "0"], "hits and misses of a later process"


def test_a_dropped_backend_leaves_no_thread():
    done = run_script(
        """
        import gc, threading, time
        import numpy as np
        from dgc.core.kernels.cpu.backend import NumbaKernels
        kernels = NumbaKernels(2)
        kernels.sums_of_squares([np.ones(3_000_000, np.float32)])
        assert threading.active_count() == 2
        del kernels
        gc.collect()
        deadline = time.monotonic() + 30
        while threading.active_count() > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threading.active_count() == 1
        """
    )
    assert done.returncode == 0, done.stderr


def test_kernels_and_torch_share_a_process():
    pytest.importorskip("torch")
    done = run_script(
        """
        import threading
        import numpy as np, torch
        from dgc.core.kernels.base import SegmentWork
        from dgc.core.kernels.cpu.backend import NumbaKernels
        torch.set_num_threads(2)
        kernels = NumbaKernels(2)
        stop = threading.Event()
        def compute():
            x = torch.randn(300, 300)
            while not stop.is_set(): x = torch.tanh(x @ x)
        other = threading.Thread(target=compute)
        other.start()
        n = 500_000
        u, v, control = np.zeros(n, np.float32), np.zeros(n, np.float32), kernels.new_control(1)
        for step in range(30):
            g = torch.randn(n)
            chosen = kernels.accumulate_and_select([SegmentWork(g.numpy(), None, 0, n, 500, 0.9)], u, v, control)
            kernels.mask(u, v, chosen.positions, chosen.values, masking=True)
            assert len(chosen.positions) == 500, step
        stop.set()
        other.join()
        """
    )
    assert done.returncode == 0, done.stderr


def test_results_do_not_depend_on_the_number_of_threads():
    lengths = [200_000, 17, 5000, 300_001, 64]
    offsets, size = offsets_of(lengths)
    outcomes = []
    for threads in (1, 2):
        kernels, rng = NumbaKernels(threads), np.random.default_rng(0)
        u, v, control = np.zeros(size, np.float32), np.zeros(size, np.float32), kernels.new_control(len(lengths))
        seen = []
        for step in range(15):
            factor = np.float32(1000 if step == 7 else 1)
            work = [
                SegmentWork(rng.standard_normal(n).astype(np.float32) * factor, None, o, n, max(1, n // 200), 0.9)
                for n, o in zip(lengths, offsets, strict=True)
            ]
            chosen = kernels.accumulate_and_select(work, u, v, control)
            kernels.mask(u, v, chosen.positions, chosen.values, masking=True)
            seen += [chosen.positions, chosen.values, control.copy()]
        outcomes.append([*seen, u, v])
    for one, two in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(one, two)


def test_numbas_own_setting_is_left_alone():
    import numba

    kernels = NumbaKernels(2)
    before = numba.get_num_threads()
    v = np.zeros(300_000, np.float32)
    for threads in (1, before):
        numba.set_num_threads(threads)
        kernels.sums_of_squares([v])
        assert numba.get_num_threads() == threads


def test_threads_are_the_share_of_the_host(bare_environment):
    assert default_threads() == available_cores()
    assert default_threads(1000) == 1
    assert default_threads(2) == max(1, available_cores() // 2)
    bare_environment.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", str(available_cores()))
    assert default_threads() == 1
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
    kernels = NumbaKernels(3)
    assert kernels.threads == 3
    kernels.set_threads(0)
    assert kernels.threads == 1


@pytest.mark.timeout(1500)
def test_kernels_come_from_the_cache_in_the_next_process(tmp_path):
    script = """
        import time, sys
        from numba.core import event
        from dgc.core.kernels.cpu import scatter
        from dgc.core.kernels.cpu.backend import NumbaKernels
        import numpy as np
        NumbaKernels(1).take(np.zeros(10, np.float32), np.arange(3))
        hits = sum(scatter.gather.stats.cache_hits.values())
        print("hits", hits)
    """
    first = run_script(script, NUMBA_CACHE_DIR=str(tmp_path))
    second = run_script(script, NUMBA_CACHE_DIR=str(tmp_path))
    assert "hits 0" in first.stdout, first.stderr
    assert "hits 1" in second.stdout, second.stderr


@pytest.mark.parametrize("tried", ["kernels", "codec"])
def test_without_a_writable_cache_nothing_is_kept_and_all_still_works(tmp_path, tried):
    blocked = tmp_path / "file"
    blocked.write_text("a file where a directory should be")
    done = run_script(
        """
        import sys
        import numpy as np
        from dgc.core.kernels.cpu import scatter
        from dgc.core.kernels.cpu.backend import NumbaKernels
        from dgc.core.wire import value_codec
        from dgc.core.wire.codecs.loops import bit_kernels, default_loops
        if sys.argv[1:] == ["kernels"]:
            assert NumbaKernels(1).take(np.ones(10, np.float32), np.arange(3)).sum() == 3
            kept = scatter.gather
        else:
            out = np.zeros(16, np.uint8)
            value_codec("float16").encode(np.ones(3, np.float32), np.zeros(1, np.int64), out)
            kept = default_loops().to_halves
            assert bit_kernels().__name__.endswith("numba_loops")
        assert type(kept._cache).__name__ == "NullCache", kept._cache
        """.replace("sys.argv[1:]", f"[{tried!r}]"),
        NUMBA_CACHE_DIR=str(blocked),
    )
    assert done.returncode == 0, done.stderr


def test_codecs_work_where_numba_does_not():
    done = run_script(
        """
        import numpy as np
        from dgc.core.wire import index_codec, value_codec
        from dgc.core.wire.codecs.loops import default_loops
        out = np.zeros(64, np.uint8)
        value_codec("float16").encode(np.ones(3, np.float32), np.zeros(1, np.int64), out)
        assert value_codec("float16").decode(out, 3, np.zeros(1, np.int64))[0].tolist() == [1, 1, 1]
        codec = index_codec("uint16")
        codec.encode(np.arange(3), 10, out)
        assert codec.decode(out, 10, 3)[0].tolist() == [0, 1, 2]
        assert default_loops() is None
        """,
        NUMBA_DISABLE_JIT="1",
    )
    assert done.returncode == 0, done.stderr


PIECE = """
    import os, signal, sys, threading, time
    import numpy as np
    from dgc.core.kernels.cpu.threads import Team

    taken, lock, working = [], threading.Lock(), []

    def kernel(worker, progress, pieces, fails):
        while True:
            with lock:
                if progress[0] >= pieces:
                    return
                piece = int(progress[0])
                progress[0] += 1
            working.append(piece)
            time.sleep(0.05)
            if worker == fails:
                working.remove(piece)
                raise MemoryError("no room")
            working.remove(piece)
            with lock:
                progress[1] += 1
"""


@pytest.mark.parametrize("worker", [0, 1])
def test_a_kernel_that_fails_on_any_thread_fails_the_call_and_leaves_nothing_running(worker):
    done = run_script(
        PIECE
        + f"""
    team = Team()
    for _ in range(3):
        try:
            team.run(2, kernel, 10, {worker})
        except MemoryError as error:
            assert "no room" in str(error)
        else:
            sys.exit("no error")
        assert not working, working
    team.run(2, kernel, 10, None)
"""
    )
    assert done.returncode == 0, done.stderr


def test_an_interrupt_waits_for_the_pieces_under_way():
    done = run_script(
        PIECE
        + """
    # A shell that starts jobs in the background lets them ignore this signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    team, interrupted = Team(), 0
    team.run(2, kernel, 10, None)  # what is compiled is compiled now: LLVM's callbacks would swallow an interrupt
    for delay in np.linspace(0.01, 0.3, 12):
        try:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
            team.run(2, kernel, 10, None)
            time.sleep(30)  # the signal may come late; it ends this
        except KeyboardInterrupt:
            interrupted += 1
        # The interrupt may have hit this thread's own piece, which then stays in the list; a helper's may not.
        before = list(working)
        time.sleep(0.1)
        assert working == before, (working, before)
        working.clear()
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
