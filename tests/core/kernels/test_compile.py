"""Compiled kernels are kept on disk: by processes that meet, for the next one, and not where nothing can be written."""

import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from kernel_tools import run_script

from dgc.core.kernels import compile


def test_without_a_writable_cache_nothing_is_kept_and_all_still_works(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("a file where a directory should be")
    done = run_script(
        """
        import numpy as np
        from dgc.core.codecs import VALUE_CODECS
        from dgc.core.kernels import cpu, loops
        u, v = np.zeros((2, 10), np.float32)
        cpu.NumbaKernels(1).take_out(u, v, np.arange(3), -np.ones(3, np.float32), masking=True)
        assert v.sum() == 3
        VALUE_CODECS["float16"].encode(np.ones(3, np.float32), np.zeros(1, np.int64), np.zeros(16, np.uint8))
        for kept in (cpu.mask_places, loops.to_halves):
            assert type(kept._cache).__name__ == "NullCache", kept._cache
        """,
        NUMBA_CACHE_DIR=str(blocked),
    )
    assert done.returncode == 0, done.stderr


def meets_another(patience):
    """What becomes of somebody who wants to compile while another one does."""
    try:
        with compile.compiling("second", patience=patience):
            return "compiles"
    except compile.BusyError:
        return "busy"


@pytest.mark.parametrize("locks", [True, False])
def test_who_meets_another_one_waits_where_there_are_locks(locks, tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(compile, "cache_directory", lambda: str(tmp_path))
    if not locks:
        monkeypatch.setattr(fcntl, "flock", refuse)
    with ThreadPoolExecutor(1) as pool:
        with compile.compiling("first"):
            meanwhile = pool.submit(meets_another, 0).result()
        later = pool.submit(meets_another, 0).result()
    assert (meanwhile, later) == ("busy" if locks else "compiles", "compiles")


def test_who_has_waited_long_enough_compiles_as_well(tmp_path, monkeypatch):
    monkeypatch.setattr(compile, "cache_directory", lambda: str(tmp_path))
    with ThreadPoolExecutor(1) as pool, compile.compiling("first"):
        assert pool.submit(meets_another, 1e-9).result() == "compiles"


@pytest.mark.parametrize(
    ("mode", "parent", "kept"),
    [
        (0o700, 0o700, True),
        (0o755, 0o755, True),
        (0o777, 0o700, False),
        (0o770, 0o700, False),
        (0o700, 0o777, False),
        (0o700, 0o1777, True),
        (0o1777, 0o700, False),
    ],
)
def test_kernels_are_kept_only_where_no_other_user_can_write(mode, parent, kept, tmp_path, caplog):
    """An index of Numba's is a pickle: whoever can write there can run code as this user."""
    folder = tmp_path / "parent" / "kernels"
    folder.mkdir(parents=True)
    folder.parent.chmod(parent)
    folder.chmod(mode)
    assert compile.usable(str(folder)) is kept
    refused = folder if mode & 0o022 else folder.parent
    assert ("other users may write to " + str(refused) + "." in caplog.text) is not kept


def test_the_folder_of_kernels_is_made_for_this_user_alone(tmp_path):
    folder = tmp_path / "cache" / "kernels"
    before = os.umask(0o002)
    try:
        assert compile.usable(str(folder))
    finally:
        os.umask(before)
    assert [each.stat().st_mode & 0o777 for each in (folder, folder.parent)] == [0o700, 0o700]


def test_a_link_that_another_user_may_have_made_is_no_folder_for_kernels(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "kernels").symlink_to(tmp_path / "mine")
    assert not compile.usable(str(tmp_path / "kernels"))


@pytest.mark.parametrize(("owner", "kept"), [(1000, True), (0, True), (1001, False)])
@pytest.mark.parametrize("foreign", ["folder", "parent"])
def test_kernels_are_not_kept_in_a_folder_of_another_user(owner, kept, foreign, tmp_path, monkeypatch):
    folder = tmp_path / "parent" / "kernels"
    other = {"folder": folder, "parent": folder.parent}[foreign]

    def owned(path, **_):
        return SimpleNamespace(st_uid=owner if path == other else 1000, st_mode=os.lstat(path).st_mode)

    monkeypatch.setattr(compile.os, "getuid", lambda: 1000)
    folder.mkdir(mode=0o700, parents=True)
    monkeypatch.setattr(Path, "stat", owned)
    assert compile.usable(str(folder)) is kept
