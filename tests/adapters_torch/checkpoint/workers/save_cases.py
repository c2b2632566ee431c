"""On real ranks: checkpoints that cannot be written, or come at the wrong moment."""

import contextlib
import errno
import functools
import os
from pathlib import Path
from unittest.mock import patch

import horovod.torch as hvd
import torch
from adapters_torch.workers.models import make_model, on_every_rank
from checkpoint_tools import OPTIONS, Job, files_of, folders, sgd
from worker_tools import case

import dgc.torch as dgc
from dgc.torch.checkpoint import gathered_states


@contextlib.contextmanager
def full_disk(after, here):
    """From the ``after``-th file on that is flushed, on this rank, the disk is full."""
    flush, count = os.fsync, 0

    def fsync(file):
        nonlocal count
        count += 1
        if count > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(file)

    if here:
        os.fsync = fsync
    try:
        yield
    finally:
        os.fsync = flush


@case
def a_full_disk_leaves_the_old_checkpoint_and_nothing_else():
    with folders("full") as folder:
        job = Job().train(2)
        job.save(folder, extra=1)
        before = files_of(folder)
        job.train(1)
        for after, rank, name in ((0, 1, "00001-of-"), (1, 0, "checkpoint.pt"), (0, 0, "00000-of-")):
            with full_disk(after, hvd.rank() == rank):
                on_every_rank(
                    dgc.TransportError,
                    f"{name}.* could not be written: No space left on device; what was saved before stays",
                    functools.partial(job.save, folder, extra=2),
                    f"full {after} {rank}",
                )
            assert files_of(folder) == before, name
        assert job.load(folder) == 1
        job.save(folder, extra=3)
        assert len(files_of(folder)) == 1 + hvd.size()
        assert job.load(folder) == 3
        job.close()


@case(way=("save_checkpoint", "gathered_states"))
def a_rank_that_cannot_copy_its_state_is_an_error_on_all_ranks(way):
    with folders("memory") as folder:
        job = Job().train(1)
        save = functools.partial(job.save, folder)
        if way == "gathered_states":
            save = functools.partial(gathered_states, job.compression)
        with contextlib.ExitStack() as stack:
            if hvd.rank() == 1:
                stack.enter_context(patch.object(job.compression, "state_dict", side_effect=MemoryError("no room")))
            on_every_rank((MemoryError, dgc.RemoteError), "no room", save)
        save()
        job.train(1).close()


@case
def a_folder_that_one_rank_cannot_list_holds_a_whole_checkpoint():
    with folders("unlisted") as folder, contextlib.ExitStack() as stack:
        job = Job().train(1)
        if hvd.rank() == 1:
            stack.enter_context(patch.object(Path, "iterdir", side_effect=PermissionError("not yours")))
        job.save(folder, extra=1)
        job.train(1)
        assert job.load(folder) == 1
        job.close()


@case
def files_that_no_checkpoint_names_go_with_the_next_save_and_strangers_stay():
    """Rank 0 of a job that was killed may have been any rank, and of any number."""
    old, draft = "0123456789abcdef", ".fedcba9876543210.partial"
    left = [f"compressor-{old}-00000-of-00002.pt", f"compressor-{old}-00007-of-00009.pt", f"checkpoint.pt{draft}"]
    left += [f"compressor-{old}-00001-of-00002.pt{draft}"]
    strangers = ["best.pt", "checkpoint.pt.partial", "compressor-notes-00000-of-00001.pt", "model.partial"]
    with folders("left") as folder:
        if hvd.rank() == 0:
            for name in (*left, *strangers):
                (folder / name).touch()
            torch.save({"token": "*", "size": 2}, folder / "checkpoint.pt")
        hvd.barrier()
        job = Job().train(1)
        for _ in range(2):
            job.save(folder)
            found = set(files_of(folder))
            assert found >= set(strangers)
            assert not found & set(left)
            assert len(found) == len(strangers) + 1 + hvd.size()
        job.close()


@case
def ranks_that_name_different_folders_write_nothing():
    with folders("one", "other") as both:
        job = Job().train(1)
        on_every_rank(
            dgc.ConfigError,
            r"'directory' is .*-resume-.* on rank 0 and .*. Give every rank the same directory",
            functools.partial(job.save, both[hvd.rank() % 2]),
            "folders",
        )
        assert [files_of(folder) for folder in both] == [files_of(both[0])] * 2
        assert not files_of(both[0])
        job.save(both[0])
        job.close()


@case
def a_state_that_is_not_finite_does_not_replace_a_good_one():
    with folders("finite") as folder:
        job = Job().train(1)
        job.save(folder)
        before = files_of(folder)
        if hvd.rank() == 1:
            job.compression.engine.exchange.state.buckets[0].v[3] = float("inf")
        on_every_rank(dgc.LayoutError, "not finite", functools.partial(job.save, folder))
        assert files_of(folder) == before
        job.close()


# -- after a step that failed ----------------------------------------------------------------------------------------


def fail_a_step(job):
    """All ranks get the error of one whose learning rate differs."""
    group = job.optimizer.param_groups[0]
    group["lr"] *= 1 + hvd.rank()
    on_every_rank(dgc.DGCError, "learning rate", lambda: job.train(1))
    group["lr"] = 0.05


@case
def an_emergency_save_after_a_failed_step_is_refused():
    for way in "ab":
        with folders("failed") as folder:
            job = Job(way).train(2)
            fail_a_step(job)
            text = "after a step that failed .*reset"
            on_every_rank(dgc.LayoutError, text, functools.partial(job.save, folder), way)
            assert files_of(folder) == []
            on_every_rank(dgc.LayoutError, "after a step that failed", job.compression.state_dict, way)
            job.compression.reset()
            job.save(folder)
            job.close()


# -- too early, too late ------------------------------------------------------------------------------------------


@case
def before_wrapping_and_after_closing_there_is_one_error():
    with folders("early") as folder:
        model = make_model()
        early = dict(model=model, optimizer=sgd(model), compression=dgc.Compression.dgc(**OPTIONS))
        for call in (dgc.save_checkpoint, dgc.load_checkpoint):
            on_every_rank(
                dgc.ConfigError, "wrap the optimizer first", functools.partial(call, folder, **early), "early"
            )
        assert files_of(folder) == []
        job = Job().train(1)
        job.save(folder)
        job.close()
        before = files_of(folder)
        for function in (job.save, job.load):
            call = functools.partial(function, folder)
            on_every_rank(dgc.TransportError, r"after close\(\)", call, "closed")
        assert files_of(folder) == before
