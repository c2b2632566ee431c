"""Libraries find their environment by paths relative to themselves."""

from pathlib import Path

from dgc.build_horovod.relocation import relocatable_runpath


def test_run_paths_of_the_environment_become_relative():
    prefix = Path("/env")
    origin = prefix / "lib/python3.11/site-packages/horovod/torch"
    runpath = "/env/lib:/env/lib:/usr/lib/mpi:/env/lib/python3.11/site-packages/torch/lib"
    assert relocatable_runpath(runpath, prefix, origin).split(":") == [
        "$ORIGIN/../../../..",
        "/usr/lib/mpi",
        "$ORIGIN/../../torch/lib",
    ]
