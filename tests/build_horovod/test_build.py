"""The environment in which Horovod is compiled."""

from pathlib import Path

from build_tools import make_toolchain

from dgc.build_horovod.build import build_environment, estimate, relocatable_runpath


def test_the_estimate_follows_cores_and_frameworks():
    assert estimate(make_toolchain(jobs=2, tensorflow="2.21.0")) == "5 to 20 minutes with 2 compilers at once"
    assert estimate(make_toolchain(jobs=16)) == "1 to 2 minutes with 16 compilers at once"


def test_build_environment_agrees_with_what_was_found(monkeypatch):
    monkeypatch.setenv("HOROVOD_WITH_TENSORFLOW", "1")
    monkeypatch.setenv("MAKEFLAGS", "w --jobserver-auth=3,4")
    environment = build_environment(make_toolchain(), {"HOROVOD_GPU_OPERATIONS": "NCCL"})
    assert environment["HOROVOD_WITH_PYTORCH"] == environment["HOROVOD_WITH_MPI"] == "1"
    assert environment["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert "HOROVOD_WITH_TENSORFLOW" not in environment
    assert environment["MAKEFLAGS"] == "-j3"
    assert environment["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"
    assert environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"


def test_run_paths_of_the_environment_become_relative():
    prefix = Path("/env")
    origin = prefix / "lib/python3.11/site-packages/horovod/torch"
    runpath = "/env/lib:/env/lib:/usr/lib/mpi:/env/lib/python3.11/site-packages/torch/lib"
    assert relocatable_runpath(runpath, prefix, origin).split(":") == [
        "$ORIGIN/../../../..",
        "/usr/lib/mpi",
        "$ORIGIN/../../torch/lib",
    ]
