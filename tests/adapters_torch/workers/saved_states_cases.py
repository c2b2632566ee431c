"""Under torchrun: states of optimizer and compressor, loaded in any order, together or one without the other."""

import atexit
import contextlib
import copy
import gc
import importlib.util
import io
import itertools
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from adapters_torch.torchrun_tools import assert_identical, digest, gathered, loss_of, make_model, on_every_rank
from adapters_torch.workers.tensors import as_bytes, through_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from worker_tools import OPENED, SkipCase, case, close_later, warned

import dgc.torch as dgc
from dgc.torch.ddp import trainer_callback
from dgc.torch.optimizer import unwrap

WARMING_UP = {"sparsity": [0.75, 0.9], "rampup_step": 8, "rampup_begin_step": 2}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.001, betas=(0.0, 0.99))


def torch_adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.001)


MAKES = {"sgd": sgd, "adam": adam}
CLASSIC_MAKES = {"sgd": sgd, "adam": torch_adam}


class Hook:
    """A model, its optimizer and its compressor in training, with DDP's hook."""

    def __init__(self, make=sgd, seed=0, **options):
        self.model = self.wrapped(make_model(seed), seed)
        self.optimizer, self.steps = make(self.model), 0
        self.compression = close_later(dgc.Compression.dgc(**(options or WARMING_UP)))

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


FRONT_ENDS = {"hook": Hook, "optimizer": Optimizer}
CLASSIC = {"error_feedback": "classic", **WARMING_UP}


def loaded(saved):
    return torch.load(io.BytesIO(saved), weights_only=True)


def told(job, steps=3):
    return warned(lambda: job.train(steps), "none into the compressor")


@case(front=FRONT_ENDS, make=MAKES)
def a_run_goes_on_bit_for_bit_in_whatever_order_its_states_are_loaded(front, make):
    straight = FRONT_ENDS[front](MAKES[make]).bind().train(5)
    saved = straight.saved()
    straight.train(5)
    for order in itertools.permutations(("bind", "optimizer", "compressor")):
        resumed = FRONT_ENDS[front](MAKES[make], seed=1)
        weights, optimizer, compressor = loaded(saved)
        resumed.model.load_state_dict(weights)
        for part in order:
            if part == "bind":
                resumed.bind()
            elif part == "optimizer":
                resumed.optimizer.load_state_dict(optimizer)
            else:
                resumed.compression.load_state_dict(compressor)
        resumed.steps = 5
        assert not told(resumed, 5), order
        assert digest(resumed.model) == digest(straight.model), order
        resumed.compression.close()


def shared_folder():
    folder = gathered(tempfile.mkdtemp() if dist.get_rank() == 0 else None)[0]
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def save_and_load(job, folder, save, flattened=False, **more):
    """Torch's distributed checkpoint of model, optimizer and what else is given."""
    job.optimizer.zero_grad()  # without gradients torch lets the optimizer step, at rate 0, to make its state
    form = StateDictOptions(flatten_optimizer_state_dict=flattened)
    weights, options = get_state_dict(job.model, job.optimizer, options=form)
    content = {"model": weights, "optimizer": options, **more}
    if save:
        return dcp.save(content, checkpoint_id=folder)
    dcp.load(content, checkpoint_id=folder)
    set_state_dict(job.model, job.optimizer, model_state_dict=weights, optim_state_dict=options, options=form)
    return None


@case(front=FRONT_ENDS, make=MAKES)
def a_run_goes_on_bit_for_bit_from_a_distributed_checkpoint(front, make):
    folder, front_end = shared_folder(), FRONT_ENDS[front]
    straight, resumed = front_end(MAKES[make]).bind().train(5), front_end(MAKES[make], seed=1).bind()
    straight.compression.average(straight.optimizer)
    steps = straight.compression.stats.steps
    save_and_load(straight, folder, save=True, compression=dgc.RankState(straight.compression, straight.optimizer))
    # With step-ahead error feedback, all ranks exchange torch's step, in which nothing changes.
    assert straight.compression.stats.steps == steps or straight.compression.config.steps_ahead
    straight.train(5)
    save_and_load(resumed, folder, save=False, compression=dgc.RankState(resumed.compression, resumed.optimizer))
    resumed.steps = 5
    assert not told(resumed, 5)
    assert digest(resumed.model) == digest(straight.model)


def momenta(job):
    """What the compressor applies as momentum, by parameter."""
    state = job.compression.state_dict(own=True)["parameters"]
    return {name: each["u"] for name, each in state.items()}


def unwrapped(model):
    return getattr(model, "module", model)


@case(early=(True, False), front=FRONT_ENDS, make=MAKES)
def without_the_compressors_state_momentum_goes_on_and_the_loss_is_told_once(early, front, make):
    """A state that is loaded before the optimizer is bound, as in the Trainer and Lightning, is not told."""
    first = FRONT_ENDS[front](MAKES[make], **CLASSIC).bind().train(4)
    weights, optimizer, _ = loaded(first.saved())
    again = FRONT_ENDS[front](MAKES[make], **CLASSIC)
    again.optimizer.load_state_dict(optimizer) if early else again.bind()
    again.bind() if early else again.optimizer.load_state_dict(optimizer)
    again.model.load_state_dict(weights)
    if make == "sgd":
        indices = {name: i for i, (name, _) in enumerate(unwrapped(again.model).named_parameters())}
        for name, u in momenta(first).items():
            assert torch.equal(optimizer["state"][indices[name]]["momentum_buffer"].flatten(), u), name
    assert told(again) == (dist.get_rank() == 0 and not early)
    assert_identical(again.model)


@case(front=FRONT_ENDS)
def a_dense_run_goes_on_with_the_momentum_of_a_compressed_one(front):
    """At sparsity 0, a step of the dense run equals the compressed run's next step."""
    first, dense = FRONT_ENDS[front](sparsity=0.0), Hook()
    weights, optimizer, _ = loaded(first.bind().train(3).saved())
    unwrapped(dense.model).load_state_dict({n.removeprefix("module."): v for n, v in weights.items()})
    dense.optimizer.load_state_dict(optimizer)
    dense.steps = 3
    dense.train(3)
    first.train(3)
    for p, q in zip(unwrapped(first.model).parameters(), unwrapped(dense.model).parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    again = FRONT_ENDS[front]().bind()
    again.optimizer.load_state_dict(through_file(dense.optimizer.state_dict()))
    assert not told(again), "the dense run has sent everything"


@case(front=FRONT_ENDS, make=CLASSIC_MAKES)
def a_state_saved_inside_step_is_the_one_after_the_latest_exchange(front, make):
    job, inside = FRONT_ENDS[front](CLASSIC_MAKES[make], **CLASSIC).bind(), []
    job.optimizer.register_step_post_hook(lambda o, *_: inside.append(copy.deepcopy(o.state_dict())))
    job.train(4)
    assert as_bytes(inside[-1]["state"]) == as_bytes(job.optimizer.state_dict()["state"])
    assert inside[-1]["state"], "there is momentum"


@case(front=FRONT_ENDS)
def a_load_is_saved_again_as_it_is(front):
    """Also if the next step has not read it, and if the script had set momentum to 0 before."""
    job = FRONT_ENDS[front]().bind()
    fresh = copy.deepcopy(job.optimizer.state_dict())
    job.train(3)
    job.optimizer.param_groups[0]["momentum"] = 0.0
    assert all(entry["momentum_buffer"].any() for entry in job.optimizer.state_dict()["state"].values())
    job.optimizer.load_state_dict(fresh)
    assert not job.optimizer.state_dict()["state"]
    assert not told(job)


@case(front=FRONT_ENDS, make=CLASSIC_MAKES)
def after_average_and_close_the_optimizer_goes_on_with_its_momentum(front, make):
    """Its saved state stays the same, and dense training or another compressor begins with it."""
    job = FRONT_ENDS[front](CLASSIC_MAKES[make], **CLASSIC).bind().train(4)
    job.compression.average(job.optimizer)
    before = as_bytes(job.optimizer.state_dict()["state"])
    model, optimizer = unwrapped(job.model), job.optimizer
    unwrap(optimizer)
    job.compression.close()
    OPENED.clear()
    del job
    gc.collect()
    assert as_bytes(optimizer.state_dict()["state"]) == before
    assert make == "adam" or all(entry["momentum_buffer"].any() for entry in optimizer.state.values())
    again = Optimizer(CLASSIC_MAKES[make], **CLASSIC)
    again.model, again.optimizer = model, optimizer
    assert not told(again.bind())


@case
def a_state_that_is_loaded_before_close_stays():
    job = Optimizer().bind()
    fresh = copy.deepcopy(job.optimizer.state_dict())
    job.train(3)
    job.compression.average(job.optimizer)
    job.optimizer.load_state_dict(fresh)
    unwrap(job.optimizer)
    assert not job.optimizer.state


@case
def after_close_the_saved_momentum_is_that_of_dense_training():
    job = Optimizer().bind().train(3)
    optimizer = job.optimizer
    unwrap(optimizer)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    saved = optimizer.state_dict()["state"]
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        assert torch.equal(saved[i]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])


@case
def a_refused_load_is_not_told():
    job = Optimizer().bind().train(3)
    job.compression.average(job.optimizer)
    saved = copy.deepcopy(job.optimizer.state_dict())
    with contextlib.suppress(ValueError):
        job.optimizer.load_state_dict({**saved, "param_groups": []})
    assert not told(job)


@case(front=FRONT_ENDS)
def a_compressors_state_without_momentum_leaves_the_optimizers(front):
    """It was saved while momentum stayed in the optimizer."""
    first = FRONT_ENDS[front](sparsity=0.0, momentum=0.0)
    again, alone = FRONT_ENDS[front](sparsity=0.0), FRONT_ENDS[front](sparsity=0.0)
    weights, optimizer, compressor = loaded(first.bind().train(3).saved())
    for job in (again, alone):
        job.bind().model.load_state_dict(weights)
        job.optimizer.load_state_dict(copy.deepcopy(optimizer))
        if job is again:
            job.compression.load_state_dict(compressor)
        job.steps = 3
        job.train(3)
    assert digest(again.model) == digest(alone.model)


@case(front=FRONT_ENDS, steps=(0, 3), early=(True, False))
def a_dense_or_a_new_state_lacks_nothing(front, steps, early):
    dense, again = FRONT_ENDS[front](), FRONT_ENDS[front]()
    if front == "hook":
        dense.train(steps)
    again.optimizer.load_state_dict(dense.optimizer.state_dict()) if early else again.bind()
    again.bind() if early else again.optimizer.load_state_dict(dense.optimizer.state_dict())
    assert not told(again)


RUNS = {"dense": Hook, "compressed": lambda: Optimizer(**CLASSIC).bind()}


@case(flattened=(False, True), way=("dense to compressed", "compressed to dense", "compressed to compressed"))
def distributed_checkpoints_carry_momentum_between_dense_and_compressed_runs(flattened, way):
    folder, (before, after) = shared_folder(), way.split(" to ")
    first, again = RUNS[before]().train(3), RUNS[after]().train(2)
    if before == "compressed":
        first.compression.average(first.optimizer)
    save_and_load(first, folder, True, flattened)
    save_and_load(again, folder, False, flattened)
    state = again.optimizer.state_dict()["state"]
    for i, entry in first.optimizer.state_dict()["state"].items():
        assert entry["momentum_buffer"].any()
        assert torch.equal(state[i]["momentum_buffer"], entry["momentum_buffer"]), i
    assert not told(again)
    assert_identical(again.model)


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
        dist.barrier()
        return state


@case(shared=(True, False))
def a_trainers_checkpoint_is_one_file_for_the_ranks_that_share_its_folder(shared):
    trainers = Trainers(shared)
    before = trainers.save(trainers.begin(0).train(5))
    assert len([*trainers.folder.glob("*/*/*")]) == (1 if shared else dist.get_world_size())
    job = trainers.begin(5, seed=3)
    assert as_bytes(job.compression.state_dict()) == before


@case(damage=("cut off on rank 0", "missing on rank 1"))
def a_trainers_file_that_one_rank_cannot_read_is_an_error_on_all(damage):
    trainers = Trainers(shared=False)
    trainers.save(trainers.begin(0).train(5))
    what, rank = damage.split(" on rank ")
    if dist.get_rank() == int(rank):
        trainers.file.unlink()
        if what == "cut off":
            trainers.file.write_bytes(b"cut off")
    on_every_rank(Exception, "", lambda: trainers.begin(5, seed=3))


@case
def a_trainers_file_that_rank_0_does_not_find_is_loaded_by_none():
    trainers = Trainers(shared=False)
    trainers.save(trainers.begin(0).train(5))
    if dist.get_rank() == 0:
        trainers.file.unlink()
    job = trainers.begin(5, seed=3)
    assert job.compression.describe()["step"] == 0
