"""A cache entry holds one wheel: its name says all that determines the wheel, and one process at a time builds it."""

import fcntl
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from build_tools import make_toolchain

from dgc.build_horovod import cache, sources
from dgc.build_horovod.process import BuildError
from dgc.build_horovod.toolchain import environment_bin


def test_digest_follows_edits_and_options():
    digests = {
        cache.recipe_digest(sources.EDITS, {}),
        cache.recipe_digest(sources.EDITS[:2], {}),
        cache.recipe_digest(sources.EDITS, {"HOROVOD_GPU_OPERATIONS": "NCCL"}),
        cache.recipe_digest(sources.EDITS, {"HOROVOD_GPU_OPERATIONS": "MPI"}),
    }
    assert len(digests) == 4


def test_only_build_variables_steer_the_build():
    environ = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CYCLE_TIME": "3", "HOME": "/", "HOROVOD_NCCL_HOME": "/n"}
    environ |= {"CXXFLAGS": "-O3", "LDFLAGS": " "}
    assert cache.user_options(environ) == {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_HOME": "/n",
        "CXXFLAGS": "-O3",
    }


def test_the_digest_of_the_recipe_stays():
    """Another digest makes every user compile again: change it with the edits or with RECIPE, for nothing else."""
    assert cache.recipe_digest(sources.EDITS, {}) == "c04f0088"


def test_a_wheel_in_the_cache_is_found_under_its_key():
    tools = make_toolchain(torch="2.13.0+cpu", tensorflow="2.21.0", mpicxx=environment_bin() / "mpicxx")
    version, platform = f"py{sys.version_info.major}.{sys.version_info.minor}{sys.abiflags}", sysconfig.get_platform()
    assert cache.cache_key(tools, {}) == (
        f"horovod0.28.1-{version}-torch2.13.0+cpu-tf2.21.0-openmpi4.1.8-env-{platform.replace('-', '_')}-c04f0088"
    )


def test_cache_key_names_every_version():
    key = cache.cache_key(make_toolchain(), {})
    for part in ("horovod0.28.1", "torch2.13.0", "openmpi4.1.8", f"py{sys.version_info.major}."):
        assert part in key
    assert "tf" not in key
    assert "/" not in key


def test_a_wider_wheel_differs_in_the_missing_framework_alone(tmp_path):
    def wheel_of(**tools):
        entry = tmp_path / cache.cache_key(make_toolchain(**tools), {})
        entry.mkdir()
        (entry / "horovod-0.28.1.whl").touch()
        return entry / "horovod-0.28.1.whl"

    for other in ({"torch": "2.12.0"}, {"mpi": "openmpi4.1.7"}, {"mpi": None, "mpicxx": None}):
        wheel_of(tensorflow="2.21.0", **other)
    assert cache.wider_wheel(tmp_path, make_toolchain(), {}) is None
    both = wheel_of(tensorflow="2.21.0")
    assert cache.wider_wheel(tmp_path, make_toolchain(), {}) == both
    assert cache.wider_wheel(tmp_path, make_toolchain(), {"HOROVOD_GPU": "CUDA"}) is None


@pytest.mark.parametrize(
    "change",
    [
        {"torch": "2.12.0"},
        {"tensorflow": "2.21.0"},
        {"mpi": "openmpi4.1.7"},
        {"mpicxx": Path("/opt/mpi/bin/mpicxx")},
        {"mpicxx": environment_bin() / "mpicxx"},
    ],
)
def test_cache_key_changes_with_what_determines_the_wheel(change):
    assert cache.cache_key(make_toolchain(**change), {}) != cache.cache_key(make_toolchain(), {})


def test_a_second_build_waits_for_the_first(tmp_path):
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code = "import sys, pathlib\nfrom dgc.build_horovod import cache\n"
        code += "with cache.locked(pathlib.Path(sys.argv[1])):\n  print('has it')\n"
        second = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert "waiting" in second.stderr.readline()
        assert second.poll() is None
    out, _ = second.communicate(timeout=300)
    assert out == "has it\n"


def test_a_cache_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(BuildError, match="--cache-dir"), cache.locked(tmp_path / "file" / "entry"):
        pass
