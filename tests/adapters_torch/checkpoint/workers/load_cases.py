"""On real ranks: checkpoints that cannot be read, or are of another model or number of ranks."""

import functools
import shutil
import warnings

import horovod.torch as hvd
import torch
from adapters_torch.workers.models import flat, loss_of, make_model, on_every_rank, wrap
from checkpoint_tools import OPTIONS, Job, assert_equal, files_of, folders, own_file, sgd
from worker_tools import case

import dgc.torch as dgc


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
    "a pattern for a token": (lambda path: change(path, lambda c: {**c, "token": "*"}), "of another kind"),
    "a path for a token": (lambda path: change(path, lambda c: {**c, "token": "/../other"}), "of another kind"),
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
    """What fits the compressor's state and not model or optimizer is an error on all ranks, too."""
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
            target = Job(seed=3)
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
            target.close()
        job.close()


@case
def a_checkpoint_of_another_op_changes_nothing_on_any_rank():
    """Neither on several ranks nor in a job of one process, whose optimizer would get P times the momentum."""
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    with folders("op") as folder:
        job = Job(rampup_begin_step=9, hvd_options={"op": hvd.Sum}).train(2)
        job.save(folder)
        for name, other in (
            ("several", Job().train(1)),
            ("one", Job(hvd_options={"process_set": sets[hvd.rank()]})),
        ):
            before = other.contents()
            load = functools.partial(other.load, folder, resize=name == "one")
            on_every_rank(dgc.LayoutError, "saved with op=sum, this job has op=average", load, name)
            assert_equal(other.contents(), before, name)
            other.close()
        same = Job(seed=1, rampup_begin_step=9, hvd_options={"op": hvd.Sum})
        same.load(folder)
        same.steps = 2
        assert torch.equal(flat(same.train(1).model), flat(job.train(1).model))
        same.close()
        job.close()
    for each in sets:
        hvd.remove_process_set(each)


def frozen_job():
    job = Job.__new__(Job)
    job.model, job.steps = make_model(), 0
    job.model.left.weight.requires_grad_(False)
    job.optimizer, job.compression = wrap("b", job.model, sgd(job.model), **OPTIONS)
    return job


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
def from_several_ranks_to_one_process_their_residuals_and_momentum_are_dropped_and_that_is_told():
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    mine = {"process_set": sets[hvd.rank()]}
    for way in "ab":
        with folders("several") as folder:
            job = Job(way, rampup_begin_step=1).train(4)
            job.save(folder)
            alone = Job(way, seed=1, hvd_options=mine, **(mine if way == "a" else {}))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                alone.load(folder, resize=True)
            told = [str(w.message) for w in caught if w.category is RuntimeWarning]
            assert len(told) == 1, told
            assert "had not sent yet, and their momentum, are dropped" in told[0], told
            assert torch.equal(flat(alone.model), flat(job.model))
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
