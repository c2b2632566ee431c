"""On real ranks: checkpoints that cannot be written or read, are not alone in their directory, or of other jobs."""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import functools
import os
import shutil
import warnings

import horovod.torch as hvd
import torch
from models import flat, loss_of, make_model, on_every_rank, shared_folder, train, wrap
from worker_tools import case, run_cases

import dgc.torch as dgc
from dgc.torch.checkpoint import save as save_module

OPTIONS = dict(sparsity=0.9, values="float16")


def sgd(model, momentum=0.9):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum, nesterov=momentum > 0, weight_decay=0.001)


class Job:
    """Model, optimizer and compressor in training."""

    def __init__(self, way="b", seed=0, width=64, hvd_options=None, **options):
        self.model = make_model(seed, width=width)
        self.optimizer, self.compression = wrap(
            way, self.model, sgd(self.model), hvd_options=hvd_options, **{**OPTIONS, **options}
        )
        self.steps = 0

    def train(self, steps):
        train(self.optimizer, self.model, steps, start=self.steps)
        self.steps += steps
        return self

    def objects(self):
        return dict(model=self.model, optimizer=self.optimizer, compression=self.compression)

    def save(self, folder, **more):
        dgc.save_checkpoint(folder, **self.objects(), **more)

    def load(self, folder, **more):
        return dgc.load_checkpoint(folder, **self.objects(), **more)

    def close(self):
        self.compression.close()

    def contents(self):
        """Copies of everything that a load could change."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        buffers = {i: copy.deepcopy(e) for i, e in self.optimizer.state_dict()["state"].items()}
        return flat(self.model).clone(), copy.deepcopy(groups), buffers, self.compression.state_dict()


def assert_equal(a, b, what):
    assert type(a) is type(b), what
    if isinstance(a, dict):
        assert a.keys() == b.keys(), what
        for key, value in a.items():
            assert_equal(value, b[key], f"{what} {key}")
    elif isinstance(a, (list, tuple)):
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other, what)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), what
    else:
        assert (a == b).all() if hasattr(a, "all") else a == b, what


@contextlib.contextmanager
def folders(*names):
    """Directories that all ranks know; gone afterwards."""
    made = [shared_folder(name) for name in names]
    try:
        yield made[0] if len(made) == 1 else made
    finally:
        hvd.barrier()
        if hvd.rank() == 0:
            for folder in made:
                shutil.rmtree(folder)


def files_of(folder):
    hvd.barrier()
    return sorted(p.name for p in folder.iterdir())


def own_file(folder, rank=1):
    return next(folder.glob(f"compressor-*-{rank:05d}-of-*"))


# -- reading ---------------------------------------------------------------------------------------------------------


def flip(path):
    """One bit of the largest thing in a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(bytes(data))


def cut(path):
    path.write_bytes(path.read_bytes()[:-500])


def change(path, function):
    torch.save(function(torch.load(path, weights_only=True)), path)


def not_finite(content):
    content["parameters"]["left.weight"]["v"][7] = float("nan")
    return content


def renamed_from(other, rank):
    """The file of a rank of another checkpoint in the place of the damaged one."""
    return lambda path: shutil.copy(own_file(other, rank), path)


MAIN = {
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "cut off": (cut, "damaged or cut off"),
    "a bit flipped": (flip, "damaged or cut off"),
    "text": (lambda path: path.write_text("no checkpoint"), "was not written by save_checkpoint"),
    "a plain checkpoint": (lambda path: torch.save({"model": {}, "optimizer": {}}, path), "of another kind.*broadcast"),
    "a state dict": (lambda path: torch.save(make_model().state_dict(), path), "of another kind.*broadcast"),
    "a list": (lambda path: torch.save([1], path), "holds a list"),
    "an object": (lambda path: torch.save(make_model(), path), "cannot be loaded"),
    "missing": (lambda path: path.unlink(), "there is no checkpoint in this directory"),
}
RANK = {
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "cut off": (cut, "damaged or cut off"),
    "a bit flipped": (flip, "damaged or cut off"),
    "a list": (lambda path: torch.save([1, 2], path), "holds a list"),
    "something else": (lambda path: torch.save({"rank": 1}, path), "was renamed"),
    "not finite": (lambda path: change(path, not_finite), "v of 'left.weight'.*not finite"),
    "half": (lambda path: change(path, lambda c: {k: v for k, v in c.items() if k != "parameters"}), "no parameters"),
    "without a parameter": (
        lambda path: change(path, lambda c: {**c, "parameters": {"left.weight": c["parameters"]["left.weight"]}}),
        "lacks parameter",
    ),
    "missing": (lambda path: path.unlink(), "is missing"),
}


@case
def a_file_that_cannot_be_read_is_named_on_every_rank_and_changes_nothing():
    with folders("good", "earlier", "bad") as (good, earlier, bad):
        job = Job().train(2)
        job.save(earlier)
        job.train(1).save(good)
        job.train(1)
        before = job.contents()
        ranks = {
            **RANK,
            "of another rank": (renamed_from(good, 0), "was renamed"),
            "of another step": (renamed_from(earlier, 1), "was renamed"),
        }
        for where, damages in (("checkpoint.pt", MAIN), ("00001-of-", ranks)):
            for name, (damage, text) in damages.items():
                hvd.barrier()
                if hvd.rank() == 0:
                    shutil.rmtree(bad)
                    shutil.copytree(good, bad)
                    damage(bad / where if where == "checkpoint.pt" else own_file(bad))
                hvd.barrier()
                label = f"{where} {name}"
                on_every_rank(
                    (dgc.DGCError, FileNotFoundError),
                    f"(?s){where}.*{text}",
                    functools.partial(job.load, bad),
                    label,
                )
                assert_equal(job.contents(), before, label)
        job.load(good)
        assert job.compression.state_dict()["step"] == 3
        job.close()


@case
def a_checkpoint_of_another_model_or_choice_changes_nothing_on_any_rank():
    """Also where only one rank's model, optimizer or choice is another one."""
    with folders("other") as folder:
        job = Job().train(2)
        job.save(folder)
        for name, text, make in (
            ("choice", "use the same min_numel", lambda: Job(exclude=("left.*",))),
            ("model", "elements, its saved u", lambda: Job(width=80)),
            ("frozen", "too many", lambda: frozen_job()),
        ):
            other = make().train(1)
            before = other.contents()
            on_every_rank((dgc.DGCError, RuntimeError), text, functools.partial(other.load, folder), name)
            assert_equal(other.contents(), before, name)
            other.train(1).close()
        for part in ("model", "optimizer"):
            target = Job(seed=3).train(1)
            before = target.contents()
            objects = target.objects()
            if hvd.rank() == 1:
                replaced = torch.nn.Linear(3, 3)
                objects[part] = replaced if part == "model" else torch.optim.SGD(replaced.parameters(), lr=0.1)
            on_every_rank(
                (dgc.DGCError, RuntimeError, ValueError),
                "state_dict for Linear|parameter group",
                functools.partial(dgc.load_checkpoint, folder, **objects),
                part,
            )
            assert_equal(target.contents(), before, part)
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # that residuals are dropped
                target.train(1)
            straight = Job(seed=3).train(2)
            assert torch.equal(flat(straight.model), flat(target.model))
            target.close()
            straight.close()
        job.close()


def frozen_job():
    job = Job.__new__(Job)
    job.model, job.steps = make_model(), 0
    job.model.left.weight.requires_grad_(False)
    job.optimizer, job.compression = wrap("b", job.model, sgd(job.model), **OPTIONS)
    return job


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


# -- writing ---------------------------------------------------------------------------------------------------------


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


@case
def two_jobs_that_save_into_one_directory_leave_each_others_files_alone():
    """The second saves while the first has written its ranks' files, and not yet the file that names them."""
    with folders("shared") as folder:
        first, second = Job().train(1), Job(seed=5).train(2)
        write, seen = save_module._write, []

        def interrupted(ranks, written, work, what):
            if what == "write the checkpoint" and not seen:
                seen.append(files_of(folder))
                second.save(folder, extra="second")
                seen.append(files_of(folder))
            write(ranks, written, work, what)

        save_module._write = interrupted
        try:
            first.save(folder, extra="first")
        finally:
            save_module._write = write
        assert set(seen[0]) < set(seen[1]), "the first job's files are still there"
        assert len(files_of(folder)) == 1 + hvd.size(), "what the first has replaced is gone"
        loaded = Job(seed=9)
        assert loaded.load(folder) == "first"
        assert torch.equal(flat(loaded.model), flat(first.model))
        for job in (first, second, loaded):
            job.close()


@case
def leftovers_of_dead_saves_and_of_more_ranks_are_deleted_and_nothing_else():
    dead, live, old = "d" * 16, "a" * 16, "0" * 16
    with folders("left") as folder:
        job = Job().train(1)
        kept = [f"compressor-{live}-00001-of-00002.pt", "checkpoint.pt.bak", "notes.txt", "compressor-mine.pt"]
        if hvd.rank() == 0:
            gone = [f"compressor-{old}-{rank:05d}-of-00004.pt" for rank in range(4)]
            gone += [f"compressor-{dead}-00003-of-00004.pt", f"compressor-{dead}-00000-of-00002.pt.partial"]
            gone += [f"checkpoint-{dead}.pt.partial", "checkpoint.pt.partial"]
            for name in (*gone, *kept):
                (folder / name).write_bytes(b"x")
            torch.save({"token": old, "size": 4}, folder / "checkpoint.pt")
        hvd.barrier()
        with (folder / kept[0]).open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_SH)  # as a save that is under way
            job.save(folder)
            files = files_of(folder)
        assert set(kept) < set(files), files
        assert len(files) == len(kept) + 1 + hvd.size(), files
        job.save(folder)
        assert kept[0] not in files_of(folder), "whoever wrote it is gone"
        job.close()


# -- after a step that failed ----------------------------------------------------------------------------------------


def fail_a_step(job):
    """All ranks get the error of one whose learning rate differs."""
    group = job.optimizer.param_groups[0]
    group["lr"] *= 1 + hvd.rank()
    on_every_rank(dgc.DGCError, "learning rate", lambda: job.train(1))
    group["lr"] = 0.05


@case
def an_emergency_save_after_a_failed_step_is_refused_or_whole():
    for way in "ab":
        with folders("failed") as folder:
            job = Job(way).train(2)
            fail_a_step(job)
            text = "after a step that failed .*reset.*discardable=True"
            on_every_rank(dgc.LayoutError, text, functools.partial(job.save, folder), way)
            assert files_of(folder) == []
            on_every_rank(dgc.LayoutError, "after a step that failed", job.compression.state_dict, way)
            job.compression.reset()
            job.save(folder)
            job.close()

            straight = Job(way, discardable=True).train(5)
            job = Job(way, discardable=True).train(2)
            fail_a_step(job)
            job.save(folder)
            job.close()
            resumed = Job(way, seed=4, discardable=True)
            resumed.load(folder)
            resumed.steps = 2
            resumed.train(3)
            assert torch.equal(flat(resumed.model), flat(straight.model)), way
            resumed.close()
            straight.close()


# -- other numbers of ranks ------------------------------------------------------------------------------------------


def save_of_one_process(folder):
    """What a job of one process saves: a dense checkpoint, in which the optimizer holds the momentum."""
    model = make_model()
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, rank=0).backward()
        optimizer.step()
    if hvd.rank() == 0:
        token = "1" * 16
        state = {"inactive": True, "rank": 0, "size": 1}
        torch.save(state, folder / f"compressor-{token}-00000-of-00001.pt")
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": 7}
        torch.save({"token": token, "size": 1, **content}, folder / "checkpoint.pt")
    hvd.barrier()


@case
def from_one_process_to_several_momentum_stays_as_with_a_dense_checkpoint():
    for way in "ab":
        with folders("one") as folder:
            save_of_one_process(folder)
            job, dense = Job(way, seed=1), Job(way, seed=2)
            on_every_rank(dgc.LayoutError, "resize=True", functools.partial(job.load, folder), way)
            assert job.load(folder, resize=True) == 7
            saved = torch.load(folder / "checkpoint.pt", weights_only=True)
            dense.model.load_state_dict(saved["model"])
            dense.optimizer.load_state_dict(saved["optimizer"])
            for each in (job, dense):
                each.steps = 3
                each.train(1)
            assert torch.equal(flat(job.model), flat(dense.model)), way
            job.train(3)
            dense.train(3)
            assert torch.equal(flat(job.model), flat(dense.model)), way
            fresh = Job(way, seed=3)
            fresh.model.load_state_dict(saved["model"])
            fresh.steps = 3
            fresh.train(1)
            dense.close()
            job.close()
            assert not torch.equal(flat(fresh.model), flat(job.model)), "momentum makes a difference"
            fresh.close()


@case
def from_several_ranks_to_one_process_the_mean_momentum_stays():
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    mine = {"process_set": sets[hvd.rank()]}
    for way in "ab":
        with folders("several") as folder:
            job = Job(way, rampup_begin_step=1).train(4)
            job.save(folder)
            states = hvd.allgather_object(job.compression.state_dict(), name="states")
            alone = Job(way, seed=1, hvd_options=mine, **(mine if way == "a" else {}))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                alone.load(folder, resize=True)
            told = [str(w.message) for w in caught if w.category is RuntimeWarning]
            assert len(told) == 1, told
            assert "is dropped; the mean of their momentum is the optimizer's" in told[0], told
            assert torch.equal(flat(alone.model), flat(job.model))
            for name, p in alone.model.named_parameters():
                if p.requires_grad:
                    u = sum(torch.from_numpy(s["parameters"][name]["u"]) for s in states) / hvd.size()
                    buffer = alone.optimizer.state[p]["momentum_buffer"]
                    assert torch.allclose(buffer.reshape(-1), u, atol=1e-7), name
                    assert buffer.any(), name
            alone.train(2)
            job.close()
            alone.close()
    for each in sets:
        hvd.remove_process_set(each)


@case
def a_rank_outside_the_process_set_saves_nothing_and_loads_the_model():
    some = hvd.add_process_set([0])
    with folders("outside") as folder:
        options = {"process_set": some}
        inside, job = hvd.rank() == 0, Job("b", hvd_options=options)
        job.train(1)
        job.save(folder)
        assert len(files_of(folder)) == 2
        loaded = Job("b", seed=hvd.rank(), hvd_options=options)
        loaded.load(folder)
        saved = torch.load(folder / "checkpoint.pt", weights_only=True)["model"]
        assert all(torch.equal(value, saved[name]) for name, value in loaded.model.state_dict().items())
        assert inside == loaded.compression.takes_part
        hvd.barrier()
        job.close()
        loaded.close()
    hvd.remove_process_set(some)


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    run_cases()
