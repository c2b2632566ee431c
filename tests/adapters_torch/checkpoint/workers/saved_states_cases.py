"""Under torchrun: states of optimizer and compressor, loaded in any order, together or one without the other."""

import importlib.util
import io
import itertools
import shutil
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from adapters_torch.torchrun_tools import assert_identical, digest, gathered, loss_of, make_model, on_every_rank
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from worker_tools import SkipCase, case, close_later

import dgc.torch as dgc
from dgc.torch.ddp import trainer_callback

WARMING_UP = {"sparsity": [0.75, 0.9], "rampup_step": 8, "rampup_begin_step": 2}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.001, betas=(0.0, 0.99))


class Hook:
    """A model, its optimizer and its compressor in training, with DDP's hook."""

    def __init__(self, make=sgd, seed=0, feedback="auto"):
        self.model = self.wrapped(make_model(seed), seed)
        self.optimizer, self.steps = make(self.model), 0
        self.compression = dgc.Compression.dgc(error_feedback=feedback, **WARMING_UP)

    def wrapped(self, module, seed):
        return DistributedDataParallel(module, bucket_cap_mb=0.1 if seed else 0.004)

    def bind(self):
        self.state = dgc.ddp.register(self.model, self.optimizer, self.compression)
        return self

    def train(self, steps):
        for step in range(self.steps, self.steps + steps):
            self.optimizer.zero_grad()
            loss_of(self.model, step).backward()
            self.optimizer.step()
        self.steps += steps
        return self

    def saved(self):
        """What a file would hold of the model, the optimizer, and this rank's compressor."""
        self.compression.average(self.optimizer)  # with step-ahead error feedback
        buffer = io.BytesIO()
        torch.save((self.model.state_dict(), self.optimizer.state_dict(), self.compression.state_dict()), buffer)
        return buffer.getvalue()


class Optimizer(Hook):
    """The same with dgc's own optimizer."""

    def wrapped(self, module, seed):
        return module

    def bind(self):
        dgc.DistributedOptimizer(self.optimizer, self.model.named_parameters(), compression=self.compression)
        return self


FRONT_ENDS = (Hook, Optimizer)


def loaded(saved):
    return torch.load(io.BytesIO(saved), weights_only=True)


def told(job, steps=3):
    """Warnings of a loss in the next steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.train(steps)
    return [str(w.message) for w in caught if "none into the compressor" in str(w.message)]


@case
def a_run_goes_on_bit_for_bit_in_whatever_order_its_states_are_loaded():
    orders = sorted(set(itertools.permutations(("bind", "optimizer", "compressor"))))
    for front_end, make in itertools.product(FRONT_ENDS, (sgd, adam)):
        straight = front_end(make).bind().train(5)
        saved = straight.saved()
        straight.train(5)
        for order in orders:
            resumed = front_end(make, seed=1)
            weights, optimizer, compressor = loaded(saved)
            resumed.model.load_state_dict(weights)
            do = {
                "bind": resumed.bind,
                "optimizer": lambda: resumed.optimizer.load_state_dict(optimizer),  # noqa: B023
                "compressor": lambda: resumed.compression.load_state_dict(compressor),  # noqa: B023
            }
            for part in order:
                do[part]()
            resumed.steps = 5
            assert not told(resumed, 5), order
            assert digest(resumed.model) == digest(straight.model), (front_end, make, order)
            resumed.compression.close()
        straight.compression.close()


def in_a_directory(job, folder, save):
    objects = {"model": job.model, "optimizer": job.optimizer, "compression": job.compression}
    if save:
        dgc.save_checkpoint(folder, **objects, extra=job.steps)
    else:
        job.steps = dgc.load_checkpoint(folder, **objects)


def in_torchs_distributed_checkpoint(job, folder, save):
    job.optimizer.zero_grad()  # without gradients torch lets the optimizer step, at rate 0, to make its state
    if save:
        job.compression.average(job.optimizer)
    steps = job.compression.stats.steps
    weights, options = get_state_dict(job.model, job.optimizer)
    # With step-ahead error feedback, all ranks exchange this step, in which nothing changes.
    assert job.compression.stats.steps == steps or job.compression.config.steps_ahead
    content = {"model": weights, "optimizer": options, "compression": dgc.RankState(job.compression)}
    if save:
        dcp.save(content, checkpoint_id=folder)
    else:
        dcp.load(content, checkpoint_id=folder)
        set_state_dict(job.model, job.optimizer, model_state_dict=weights, optim_state_dict=options)
        job.steps = 5


@case
def a_run_goes_on_bit_for_bit_from_a_checkpoint_of_the_whole_job():
    for front_end, make, way in itertools.product(
        FRONT_ENDS, (sgd, adam), (in_a_directory, in_torchs_distributed_checkpoint)
    ):
        folder = gathered(tempfile.mkdtemp() if dist.get_rank() == 0 else None)[0]
        straight, resumed = front_end(make).bind().train(5), front_end(make, seed=1)
        way(straight, folder, save=True)
        straight.train(5)
        if way is in_a_directory:
            on_every_rank(dgc.ConfigError, "wrap the optimizer first", lambda: way(resumed, folder, save=False))  # noqa: B023
        resumed.bind()
        way(resumed, folder, save=False)
        assert not told(resumed, 5)
        assert digest(resumed.model) == digest(straight.model), (front_end, make, way)
        straight.compression.close()
        resumed.compression.close()
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)


@case
def a_state_without_the_compressors_is_told_once():
    """Whether the optimizer loads before it is bound, as in the Trainer and Lightning, or after."""
    for front_end, make, early in itertools.product(FRONT_ENDS, (sgd, adam), (True, False)):
        first = front_end(make, feedback="classic").bind().train(3)
        weights, optimizer, _ = loaded(first.saved())
        first.compression.close()
        again = front_end(make, feedback="classic")
        again.optimizer.load_state_dict(optimizer) if early else again.bind()
        again.bind() if early else again.optimizer.load_state_dict(optimizer)
        again.model.load_state_dict(weights)
        said = told(again)
        assert len(said) == (dist.get_rank() == 0), said
        assert all("what the saved run had not sent yet is dropped" in text for text in said), said
        assert all(("momentum begins at 0" in text) == (make is sgd) for text in said), said
        assert all("the warm-up begins again at step 0" in text for text in said), said
        assert_identical(again.model)
        groups = again.optimizer.param_groups
        assert all("stepped_with_compressor" not in group for group in groups), "of a bound optimizer"
        again.compression.close()


@case
def one_process_says_what_it_drops():
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    first = Optimizer().bind().train(3)
    weights, optimizer, _ = loaded(first.saved())
    first.compression.close()
    again = Optimizer()
    again.model.load_state_dict(weights)
    again.optimizer.load_state_dict(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dgc.DistributedOptimizer(again.optimizer, compression=again.compression, group=alone)
    assert any("not sent yet, and their momentum, are dropped" in str(w.message) for w in caught)
    assert not any("stepped_with_compressor" in group for group in again.optimizer.param_groups)


@case
def a_dense_or_a_new_state_lacks_nothing():
    for front_end, steps, early in itertools.product(FRONT_ENDS, (0, 3), (True, False)):
        dense = front_end()
        if front_end is Hook:
            dense.train(steps)
        again = front_end()
        again.optimizer.load_state_dict(dense.optimizer.state_dict()) if early else again.bind()
        again.bind() if early else again.optimizer.load_state_dict(dense.optimizer.state_dict())
        assert not told(again)
        again.compression.close()


@case
def a_dense_run_that_goes_on_from_a_compressed_one_lacks_nothing():
    """Its optimizer keeps the key of the state that it was given, and saves it again."""
    for front_end, make in itertools.product(FRONT_ENDS, (sgd, adam)):
        first, dense = front_end(make, feedback="classic").bind().train(3), Hook(make)
        weights, optimizer, _ = loaded(first.saved())
        first.compression.close()
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
        dense.model.module.load_state_dict(weights)
        dense.optimizer.load_state_dict(optimizer)
        optimizer = dense.train(2).optimizer.state_dict()
        assert "stepped_with_compressor" in optimizer["param_groups"][0]
        again = front_end(make, feedback="classic")
        getattr(again.model, "module", again.model).load_state_dict(dense.model.module.state_dict())
        again.optimizer.load_state_dict(optimizer)
        assert not told(again.bind())
        again.compression.close()


def without_the_compressors(job, folder, save):
    """Torch's distributed checkpoint of a script that has left ``RankState`` out."""
    job.optimizer.zero_grad()
    weights, options = get_state_dict(job.model, job.optimizer)
    content = {"model": weights, "optimizer": options}
    if save:
        return dcp.save(content, checkpoint_id=folder)
    dcp.load(content, checkpoint_id=folder)
    set_state_dict(job.model, job.optimizer, model_state_dict=weights, optim_state_dict=options)
    return None


@case
def a_distributed_checkpoint_without_the_compressors_state_is_told_once():
    """Of a run with a compressor; and a dense one, to which a run with a compressor goes back."""
    for front_end, dense, steps in itertools.product(FRONT_ENDS, (False, True), (0, 4)):
        folder = gathered(tempfile.mkdtemp() if dist.get_rank() == 0 else None)[0]
        first = Hook() if dense else front_end().bind()
        without_the_compressors(first.train(3), folder, save=True)
        first.compression.close()
        again = (Hook if dense else front_end)().bind().train(steps)
        without_the_compressors(again, folder, save=False)
        said = told(again)
        assert len(said) == (dist.get_rank() == 0), (said, front_end, dense, steps)
        assert all("momentum begins at 0" in text and "RankState" in text for text in said), said
        assert_identical(again.model)
        again.compression.close()
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)


@case
def the_hooks_state_holds_every_ranks():
    """What rank 0 saves: bit for bit on as many ranks; shared out, with the same mean, on others."""
    job = Hook().bind().train(5)
    saved = gathered(job.state.state_dict())
    assert [len(each["ranks"]) for each in saved] == [dist.get_world_size()] + [0] * (dist.get_world_size() - 1)
    own = job.compression.state_dict()
    for ranks, more in ((saved[0]["ranks"], 0), ([*saved[0]["ranks"], saved[0]["ranks"][0]], 1)):
        states = [loaded(state.numpy().tobytes()) for state in ranks]
        states = [{**state, "rank": rank, "size": len(states)} for rank, state in enumerate(states)]
        other = Hook(seed=3).bind()
        if more:
            own_alone = lambda: other.compression.load_state_dict(states[dist.get_rank()])  # noqa: B023, E731
            on_every_rank(dgc.LayoutError, "resize=True", own_alone)
        other.state.load_state_dict({"ranks": [as_bytes(state) for state in states]})
        mine = other.compression.state_dict()
        assert mine["step"] == own["step"] == 5
        for name, entry in own["parameters"].items():
            if "v" not in entry:
                continue
            now = [state["parameters"][name]["v"] for state in gathered(mine)]
            before = [state["parameters"][name]["v"] for state in states]
            torch.testing.assert_close(sum(now) / len(now), sum(before) / len(before))
            assert more or torch.equal(mine["parameters"][name]["v"], entry["v"])
        other.compression.close()

    foreign = {"ranks": [as_bytes({**state, "rank": 7}) for state in states[:2]]}
    cut = {"ranks": [state[: -20 if dist.get_rank() else None] for state in saved[0]["ranks"]]}
    for wrong, text in ((foreign, "rank"), (cut, "damaged"), ({"ranks": 3}, "damaged")):
        on_every_rank(dgc.DGCError, text, lambda: job.state.load_state_dict(wrong))  # noqa: B023
    one = saved[0] if dist.get_rank() == 0 else {}
    on_every_rank(dgc.LayoutError, "file that rank 0 has written", lambda: job.state.load_state_dict(one))
    same = job.compression.state_dict()
    assert all(torch.equal(same["parameters"][n]["u"], e["u"]) for n, e in own["parameters"].items())
    job.compression.close()


class Trainers:
    """Checkpoints of Hugging Face's Trainer at step 5, in a folder that all ranks share."""

    def __init__(self):
        if importlib.util.find_spec("transformers") is None:
            raise SkipCase("transformers is not installed")
        self.folder = Path(gathered(tempfile.mkdtemp() if dist.get_rank() == 0 else None)[0])
        self.checkpoint = self.folder / "checkpoint-5"
        self.arguments = SimpleNamespace(resume_from_checkpoint=None, output_dir=self.folder)

    def begin(self, step, seed=0):
        """A job at a step, and what the Trainer calls to save."""
        job, progress = Hook(seed=seed), SimpleNamespace(global_step=step)
        callback = trainer_callback(SimpleNamespace(model_wrapped=job.model), job.compression)
        callback.on_train_begin(self.arguments, progress, None, optimizer=job.optimizer)
        return job, lambda: callback.on_save(self.arguments, SimpleNamespace(global_step=5), None)

    def close(self):
        dist.barrier()
        shutil.rmtree(self.folder, ignore_errors=True)


@case
def a_rank_needs_its_own_file_alone_of_a_trainers_checkpoint():
    """As with folders that are each node's own."""
    trainers, rank = close_later(Trainers()), dist.get_rank()
    job, save = trainers.begin(0)
    job.train(5)
    save()
    before = job.compression.state_dict()
    job.compression.close()
    names = {path.name for path in trainers.checkpoint.iterdir()}
    (own,) = (name for name in names if f"-{rank:05d}-of-" in name)
    assert len(names) == 1 + dist.get_world_size()
    trainers.arguments.output_dir = trainers.folder / f"node-{rank}"
    (trainers.arguments.output_dir / "checkpoint-5").mkdir(parents=True)
    for name in (own, "compression.pt")[: 2 - bool(rank)]:
        shutil.copy(trainers.checkpoint / name, trainers.arguments.output_dir / "checkpoint-5")
    job, _ = trainers.begin(5, seed=3)
    assert torch.equal(as_bytes(job.compression.state_dict()), as_bytes(before))
    job.compression.close()


@case
def a_trainers_checkpoint_and_save_checkpoint_share_a_folder():
    trainers = close_later(Trainers())
    job, save = trainers.begin(0)
    everything = {"model": job.model, "optimizer": job.optimizer, "compression": job.compression}
    job.train(3)
    save()
    dgc.save_checkpoint(trainers.checkpoint, **everything)
    save()
    before = job.compression.state_dict()
    job.train(2)
    dgc.load_checkpoint(trainers.checkpoint, **everything)
    assert torch.equal(as_bytes(job.compression.state_dict()), as_bytes(before))
    job.compression.close()
    job, _ = trainers.begin(5, seed=3)
    assert torch.equal(as_bytes(job.compression.state_dict()), as_bytes(before))
    job.compression.close()


@case
def a_trainers_checkpoint_that_rank_0_cannot_read_is_refused():
    trainers = close_later(Trainers())
    job, save = trainers.begin(0)
    job.train(3)
    save()
    job.compression.close()
    if dist.get_rank() == 0:
        (trainers.checkpoint / "compression.pt").write_bytes(b"cut off")
    dist.barrier()
    on_every_rank(dgc.DGCError, "compression.pt is empty, damaged or cut off", lambda: trainers.begin(5, seed=3))


def as_bytes(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
