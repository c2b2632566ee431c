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
from adapters_torch.workers.tensors import as_bytes
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
        """The file of rank 0, which holds the states of model, optimizer and compressor."""
        self.compression.average(self.optimizer)
        buffer = io.BytesIO()
        torch.save([each.state_dict() for each in (self.model, self.optimizer, self.compression)], buffer)
        return gathered(buffer.getvalue())[0]


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


def shared_folder():
    return gathered(tempfile.mkdtemp() if dist.get_rank() == 0 else None)[0]


def save_and_load(job, folder, save, **more):
    """Torch's distributed checkpoint of model, optimizer and what else is given."""
    job.optimizer.zero_grad()  # without gradients torch lets the optimizer step, at rate 0, to make its state
    weights, options = get_state_dict(job.model, job.optimizer)
    content = {"model": weights, "optimizer": options, **more}
    if save:
        return dcp.save(content, checkpoint_id=folder)
    dcp.load(content, checkpoint_id=folder)
    set_state_dict(job.model, job.optimizer, model_state_dict=weights, optim_state_dict=options)
    return None


@case
def a_run_goes_on_bit_for_bit_from_a_distributed_checkpoint():
    for front_end, make in itertools.product(FRONT_ENDS, (sgd, adam)):
        folder = shared_folder()
        straight, resumed = front_end(make).bind().train(5), front_end(make, seed=1).bind()
        straight.compression.average(straight.optimizer)
        steps = straight.compression.stats.steps
        save_and_load(straight, folder, save=True, compression=dgc.RankState(straight.compression, straight.optimizer))
        # With step-ahead error feedback, all ranks exchange torch's step, in which nothing changes.
        assert straight.compression.stats.steps == steps or straight.compression.config.steps_ahead
        straight.train(5)
        save_and_load(resumed, folder, save=False, compression=dgc.RankState(resumed.compression, resumed.optimizer))
        resumed.steps = 5
        assert not told(resumed, 5)
        assert digest(resumed.model) == digest(straight.model), (front_end, make)
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


@case
def a_distributed_checkpoint_without_the_compressors_state_is_told_once():
    """Of a run with a compressor; and a dense one, to which a run with a compressor goes back."""
    for front_end, dense, steps in itertools.product(FRONT_ENDS, (False, True), (0, 4)):
        folder = shared_folder()
        first = Hook() if dense else front_end().bind()
        save_and_load(first.train(3), folder, save=True)
        first.compression.close()
        again = (Hook if dense else front_end)().bind().train(steps)
        save_and_load(again, folder, save=False)
        said = told(again)
        assert len(said) == (dist.get_rank() == 0), (said, front_end, dense, steps)
        assert all("momentum begins at 0" in text and "RankState" in text for text in said), said
        assert_identical(again.model)
        again.compression.close()
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)


@case
def the_hooks_state_is_the_same_on_all_ranks_and_an_empty_one_resets():
    job, other = Hook().bind().train(5), Hook(seed=3).bind()
    saved = job.state.state_dict()
    assert all(each == as_bytes(saved) for each in gathered(as_bytes(saved)))
    other.state.load_state_dict(saved)
    assert as_bytes(other.compression.state_dict()) == as_bytes(saved)
    own = as_bytes(job.train(1).compression.state_dict(own=True))
    for mine in ({**saved, "step": 5 + dist.get_rank()}, {} if dist.get_rank() else saved):
        on_every_rank(dgc.LayoutError, "states differ between ranks", lambda: job.state.load_state_dict(mine))  # noqa: B023
        assert as_bytes(job.compression.state_dict(own=True)) == own
    job.state.load_state_dict({})
    assert job.compression.residual_norm == 0
    job.compression.close()
    other.compression.close()


class Trainers:
    """Checkpoints of Hugging Face's Trainer at step 5, in a folder that all ranks share, or in one of each rank."""

    def __init__(self, shared):
        if importlib.util.find_spec("transformers") is None:
            raise SkipCase("transformers is not installed")
        self.folder, rank = Path(shared_folder()), dist.get_rank()
        output = self.folder / f"node-{0 if shared else rank}"
        self.file = output / "checkpoint-5" / "compression.pt"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.arguments = SimpleNamespace(
            resume_from_checkpoint=None, output_dir=output, should_save=rank == 0 or not shared
        )

    def begin(self, step, seed=0):
        job = Hook(seed=seed)
        self.callback = trainer_callback(SimpleNamespace(model_wrapped=job.model), job.compression)
        progress = SimpleNamespace(global_step=step)
        self.callback.on_train_begin(self.arguments, progress, None, optimizer=job.optimizer)
        return job

    def save(self, job):
        """What the Trainer calls after a step; returns what is loaded later."""
        control = SimpleNamespace(should_save=True, should_evaluate=False)
        self.callback.on_step_end(self.arguments, None, control, optimizer=job.optimizer)
        self.callback.on_save(self.arguments, SimpleNamespace(global_step=5), control, optimizer=job.optimizer)
        state = as_bytes(job.compression.state_dict())
        job.compression.close()
        dist.barrier()
        return state

    def close(self):
        dist.barrier()
        shutil.rmtree(self.folder, ignore_errors=True)


@case(shared=(True, False))
def a_trainers_checkpoint_is_one_file_for_the_ranks_that_share_its_folder(shared):
    trainers = close_later(Trainers(shared))
    before = trainers.save(trainers.begin(0).train(5))
    assert len([*trainers.folder.glob("*/*/*")]) == (1 if shared else dist.get_world_size())
    job = trainers.begin(5, seed=3)
    assert as_bytes(job.compression.state_dict()) == before
    job.compression.close()


@case(damage=("cut off on rank 0", "missing on rank 1"))
def a_trainers_file_that_one_rank_cannot_read_is_an_error_on_all(damage):
    trainers = close_later(Trainers(shared=False))
    trainers.save(trainers.begin(0).train(5))
    what, rank = damage.split(" on rank ")
    if dist.get_rank() == int(rank):
        trainers.file.unlink()
        if what == "cut off":
            trainers.file.write_bytes(b"cut off")
    on_every_rank(Exception, "", lambda: trainers.begin(5, seed=3))


@case
def a_trainers_file_that_rank_0_does_not_find_is_loaded_by_none():
    trainers = close_later(Trainers(shared=False))
    trainers.save(trainers.begin(0).train(5))
    if dist.get_rank() == 0:
        trainers.file.unlink()
    job = trainers.begin(5, seed=3)
    assert job.compression.describe()["step"] == 0
    job.compression.close()
