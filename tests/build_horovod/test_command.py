"""The command line: its help, its errors, its way through cache and installation, and what it does not need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from build_tools import make_toolchain

import dgc
from dgc.__main__ import main
from dgc.build_horovod import command
from dgc.build_horovod.cache import cache_key
from dgc.build_horovod.process import BuildError

HEAVY = ("torch", "tensorflow", "keras", "mpi4py", "horovod", "cupy", "numba", "numpy")


def dgc_command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "dgc", *arguments], capture_output=True, text=True, check=False, **options
    )


def test_the_command_line_reports_errors_without_a_traceback():
    done = dgc_command("build-horovod", "--without", "torch", "--without", "tensorflow")
    assert done.returncode == 1
    assert done.stderr.strip().startswith("error: Neither PyTorch nor TensorFlow")
    assert "Traceback" not in done.stderr


def test_help_lists_the_commands_and_their_options():
    for name in ("compressors", "build-horovod"):
        assert name in dgc_command("--help").stdout
    done = dgc_command("build-horovod", "--help")
    for option in ("--install", "--print-path", "--force", "--without", "--jobs", "--sdist", "--cache-dir"):
        assert option in done.stdout
    assert "usage: python -m dgc build-horovod" in done.stdout


def test_without_a_command_they_are_listed_and_the_version_is_told(capsys):
    assert main([]) == 2
    told = capsys.readouterr().err
    assert "compressors" in told
    assert "build-horovod" in told
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"horovod-dgc {dgc.__version__}\n"


@pytest.mark.parametrize("jobs", ["0", "-2", "two"])
def test_a_wrong_number_of_jobs_is_refused(jobs, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["build-horovod", "--jobs", jobs])
    assert "at least 1" in capsys.readouterr().err


def test_the_command_imports_nothing_that_may_be_missing(tmp_path):
    """Not even what this package depends on: Horovod is often built before the rest of an environment works."""
    for name in HEAVY:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} was imported')")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    arguments = ("build-horovod", "--without", "torch", "--without", "tensorflow")
    done = dgc_command(*arguments, env={**os.environ, "PYTHONPATH": path})
    assert done.stderr.strip().startswith("error: Neither PyTorch nor TensorFlow")


@pytest.fixture
def steps(monkeypatch):
    """Replace the minutes of the command by notes of what it does."""
    done = []

    def build(tools, options, sdist, log):
        done.append("build")
        wheel = log.with_name("horovod-0.28.1-test.whl")
        wheel.write_bytes(b"a wheel")
        return wheel

    monkeypatch.setattr(command, "detect", lambda without, jobs: make_toolchain())
    monkeypatch.setattr(command, "build", build)
    monkeypatch.setattr(command, "install", lambda wheel, tools: done.append(f"install {wheel.name}"))
    return done


@pytest.mark.parametrize("loads", [True, False])
def test_a_wheel_for_both_frameworks_serves_where_one_is_installed(steps, tmp_path, monkeypatch, capsys, loads):
    def require_loading(wheel, tools):
        if not loads:
            raise BuildError("no")

    monkeypatch.setattr(command, "require_loading", require_loading)
    entry = tmp_path / cache_key(make_toolchain(tensorflow="2.21.0"), command.user_options(os.environ))
    entry.mkdir()
    (entry / "horovod-0.28.1-both.whl").write_bytes(b"of both")
    chosen = ["build-horovod", "--install", "--cache-dir", str(tmp_path)]
    assert main([*chosen, "--without", "tensorflow"]) == 0
    assert steps == ["build", "install horovod-0.28.1-test.whl"], "a part was left out on purpose"
    next(tmp_path.rglob("*-test.whl")).unlink()
    steps.clear()
    assert main(chosen) == 0
    assert steps == (["install horovod-0.28.1-both.whl"] if loads else ["build", "install horovod-0.28.1-test.whl"])
    assert ("does not load here" in capsys.readouterr().err) is not loads


def test_a_wheel_is_built_once_and_found_after_that(steps, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cache = ["--cache-dir", "cache"]
    assert main(["build-horovod", "--print-path", *cache]) == 0
    wheel = Path(capsys.readouterr().out.strip())
    assert wheel.read_bytes() == b"a wheel"
    assert wheel.is_relative_to(tmp_path / "cache")
    assert main(["build-horovod", "--install", *cache]) == 0
    assert "Found in the cache" in capsys.readouterr().err
    assert steps == ["build", "install horovod-0.28.1-test.whl"]
    assert main(["build-horovod", "--force", *cache]) == 0
    assert steps[2:] == ["build"]
