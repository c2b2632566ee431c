"""A compressor's state before and after it is bound to a model, saved and loaded, on 2 real ranks."""

import copy
import functools
import itertools
import pickle
import warnings

import horovod.torch as hvd
import torch
from adapters_torch.workers.tensors import as_bytes, through_file
from models import assert_replicas_identical, flat, loss_of, make_model, on_every_rank, raises, train, wrap
from torch.optim import lr_scheduler
from worker_tools import case

import dgc.torch as dgc

WARMING_UP = dict(sparsity=[0.75, 0.99], rampup_step=8, rampup_begin_step=3, values="float16")


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.001)


class Job:
    """Model, optimizer and compressor in training."""

    def __init__(self, way="b", seed=0, width=64, frozen=(), hvd_options=None, **options):
        self.model = make_model(seed, width=width)
        for name in frozen:
            self.model.get_parameter(name).requires_grad_(False)
        options = options or {"sparsity": 0.9}
        self.optimizer, self.compression = wrap(
            way, self.model, sgd(self.model), hvd_options=hvd_options, **{"values": "float16", **options}
        )
        self.steps = 0

    def train(self, steps):
        train(self.optimizer, self.model, steps, start=self.steps)
        self.steps += steps
        return self

    def saved(self):
        """What rank 0 has in a file."""
        self.compression.average(self.optimizer)
        parts = self.model, self.optimizer, self.compression
        return through_file(hvd.allgather_object([each.state_dict() for each in parts])[0])

    def load(self, saved, steps):
        for each, state in zip((self.model, self.optimizer, self.compression), saved, strict=True):
            each.load_state_dict(state)
        self.steps = steps
        return self

    def contents(self):
        """All bits that a load could change."""
        states = self.optimizer.state_dict(), self.compression.state_dict(own=True)
        return as_bytes([flat(self.model), *states])


# -- going on --------------------------------------------------------------------------------------------------------


@case(way="ab", cut=(2, 6, 13))
def a_resumed_run_goes_on_bit_for_bit(way, cut):
    straight, resumed = Job(way, **WARMING_UP).train(cut), Job(way, seed=9, **WARMING_UP)
    resumed.load(straight.saved(), cut)
    straight.train(16 - cut)
    resumed.train(16 - cut)
    assert torch.equal(flat(resumed.model), flat(straight.model))
    assert_replicas_identical(resumed.model)


class ByHand:
    """A user's own schedule of everything that the compressor applies in the optimizer's place."""

    def __init__(self, optimizer):
        self._optimizer, self._count = optimizer, 0

    def step(self):
        self._count += 1
        group = self._optimizer.param_groups[0]
        group.update(momentum=0.8 + 0.03 * self._count, weight_decay=0.001 * self._count, nesterov=self._count > 2)

    def state_dict(self):
        return {"count": self._count}

    def load_state_dict(self, state):
        self._count = state["count"]


SCHEDULES = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, base_momentum=0.7, max_momentum=0.95),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=7),
    "momentum by hand": ByHand,
}


@case(way="ab", schedule=SCHEDULES)
def a_schedule_goes_on_from_a_state_saved_before_or_after_its_step(way, schedule):
    straight = Job(way)
    scheduler = SCHEDULES[schedule](straight.optimizer)
    for _ in range(2):
        straight.train(1)
        scheduler.step()
    straight.train(1)
    before = straight.saved(), copy.deepcopy(scheduler.state_dict())
    scheduler.step()
    after = straight.saved(), copy.deepcopy(scheduler.state_dict())
    for _ in range(3):
        straight.train(1)
        scheduler.step()
    for saved, of_schedule in (before, after):
        resumed = Job(way, seed=1)
        scheduler = SCHEDULES[schedule](resumed.optimizer)
        resumed.load(saved, 3)
        scheduler.load_state_dict(of_schedule)
        if saved is before[0]:
            scheduler.step()
        for _ in range(3):
            resumed.train(1)
            scheduler.step()
        assert torch.equal(flat(resumed.model), flat(straight.model))


@case
def stock_horovod_may_wrap_the_optimizer_after_its_state_was_loaded():
    """Of a run whose options were changed by hand since the optimizer was built."""
    straight = Job("a")
    straight.optimizer.param_groups[0].update(lr=0.03, momentum=0.8)
    saved = straight.train(3).saved()
    straight.train(3)
    resumed = Job.__new__(Job)
    resumed.model = make_model(seed=1)
    resumed.optimizer, named = sgd(resumed.model), list(resumed.model.named_parameters())
    resumed.compression = dgc.Compression.dgc(named, optimizer=resumed.optimizer, sparsity=0.9, values="float16")
    resumed.load(saved, 3)
    resumed.optimizer = hvd.DistributedOptimizer(resumed.optimizer, named, compression=resumed.compression)
    resumed.train(3)
    assert torch.equal(flat(resumed.model), flat(straight.model))
    resumed.compression.close()


# -- one state for all ranks -----------------------------------------------------------------------------------------


@case(way="ab")
def from_one_process_to_several_momentum_stays_as_with_a_dense_checkpoint(way):
    alone = make_model()
    optimizer = sgd(alone)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(alone, step, rank=0).backward()
        optimizer.step()
    saved = through_file([alone.state_dict(), optimizer.state_dict()])
    job = Job(way, seed=1).load([*saved, {"inactive": True}], 3).train(4)
    dense = Job(way, seed=2).load([*saved, dgc.Compression.dgc().state_dict()], 3).train(4)
    assert torch.equal(flat(job.model), flat(dense.model))
    fresh = Job(way, seed=3)
    fresh.model.load_state_dict(saved[0])
    fresh.steps = 3
    assert not torch.equal(flat(fresh.train(4).model), flat(job.model)), "momentum makes a difference"


@case(way="ab")
def from_several_ranks_to_one_process_residuals_are_dropped_and_that_is_told(way):
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    mine = {"process_set": sets[hvd.rank()]}
    saved = Job(way).train(4).saved()
    alone = Job(way, seed=1, hvd_options=mine, sparsity=0.9, **(mine if way == "a" else {}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alone.load(saved, 4)
    told = [str(w.message) for w in caught if w.category is RuntimeWarning]
    assert len(told) == 1, told
    assert "had not sent" in told[0], told
    alone.train(2)
    for each in sets:
        hvd.remove_process_set(each)


# -- what is refused -------------------------------------------------------------------------------------------------


def changed(state, key, change):
    """Another value of a parameter's array."""
    parameters = copy.deepcopy(state["parameters"])
    change(parameters["left.weight"][key])
    return {**state, "parameters": parameters}


REFUSED = {
    "not finite": (
        "v of 'left.weight'.*not finite",
        lambda state: changed(state, "v", lambda v: v[7:].fill_(torch.nan)),
    ),
    "of another op": ("saved with op=sum, this job has op=average", lambda state: {**state, "op": "sum"}),
    "empty": ("states differ between ranks", lambda state: {}),
    "of another step": ("states differ between ranks", lambda state: {**state, "step": 9}),
    "of another rank": ("states differ between ranks", lambda state: changed(state, "v", lambda v: v[7:].neg_())),
}


@case(which=REFUSED)
def a_state_that_is_wrong_on_one_rank_changes_nothing_on_any(which):
    job = Job().train(3)
    _, _, state = job.saved()
    job.train(1)
    before, (text, change) = job.contents(), REFUSED[which]
    mine = change(state) if hvd.rank() == 1 else state
    on_every_rank(dgc.LayoutError, text, lambda: job.compression.load_state_dict(mine))
    assert job.contents() == before
    job.compression.load_state_dict(state)
    assert job.compression.describe()["step"] == 3


OTHERS = {
    "choice": ("use the same min_numel", dict(exclude=("left.*",))),
    "model": ("elements, its saved u", dict(width=80)),
    "frozen": ("too many", dict(frozen=("left.weight",))),
}


@case(what=OTHERS)
def one_of_another_model_or_choice_is_refused_and_changes_nothing(what):
    _, _, state = Job().train(2).saved()
    text, options = OTHERS[what]
    other = Job(**{"sparsity": 0.9, **options}).train(1)
    before = other.contents()
    on_every_rank(dgc.LayoutError, text, lambda: other.compression.load_state_dict(state))
    assert other.contents() == before
    other.train(1)


EMPTY = {
    "of a new compressor": lambda: dgc.Compression.dgc().state_dict(),
    "{}": dict,
    "of one process": lambda: {"inactive": True},
}


@case(which=EMPTY)
def an_empty_one_resets(which):
    job = Job().train(2)
    assert job.compression.residual_norm > 0
    job.compression.load_state_dict(EMPTY[which]())
    assert job.compression.residual_norm == 0
    assert job.compression.describe()["step"] == 0
    job.train(1)


# -- at the wrong moment ---------------------------------------------------------------------------------------------


def saving(job):
    """The calls of a script that saves."""
    return {
        "average": lambda: job.compression.average(job.optimizer),
        "state_dict": job.compression.state_dict,
        "state_dict of its own": lambda: job.compression.state_dict(own=True),
    }


@case(way="ab")
def in_the_middle_of_a_step_saving_is_refused(way):
    """Before it uses the transport, which belongs to the exchange then; the step goes on as if nothing was called."""
    straight, job = Job(way).train(6), Job(way).train(3)
    job.optimizer.zero_grad()
    loss_of(job.model, 3).backward()
    for name, call in saving(job).items():
        raises(dgc.LayoutError, rf"^{name.split()[0]}\(\) was called while a step is under way", call)
    job.optimizer.step()
    job.steps += 1
    assert torch.equal(flat(job.train(2).model), flat(straight.model))


def rates_differ(job):
    job.optimizer.param_groups[0]["lr"] /= 1 + hvd.rank()
    on_every_rank(dgc.ConfigError, "learning rate", lambda: train(job.optimizer, job.model, 1, start=2))
    job.optimizer.param_groups[0]["lr"] = 0.05


def interrupted(job, layer="first"):
    job.optimizer.zero_grad()
    hook = getattr(job.model, layer).weight.register_hook(lambda g: 1 / 0)
    raises(ZeroDivisionError, "", lambda: loss_of(job.model, 2).backward())
    hook.remove()


def interrupted_elsewhere(job):
    interrupted(job, ("first", "left")[hvd.rank() % 2])


@case(way="ab")
def after_a_failed_step_saving_is_refused_until_a_reset(way):
    job = Job(way).train(2)
    rates_differ(job)
    for name, call in saving(job).items():
        on_every_rank(dgc.LayoutError, "after a step that failed .*reset", call, name)
    job.compression.reset()
    job.saved()


@case
def after_an_error_or_an_exception_training_goes_on_from_a_reset_or_a_loaded_state():
    """With Horovod's own optimizer the next step is an error if an exchange had begun; with a new model it goes on."""
    ways = [*itertools.product("b", [None], (rates_differ, interrupted, interrupted_elsewhere), (False, True))]
    ways += [*itertools.product("a", [None], (rates_differ, interrupted), (False, True))]
    ways += [(way, {"backward_passes_per_step": 2}, interrupted, True) for way in "ab"]
    ways += [("a", {"groups": 2}, interrupted, True)]
    for way, hvd_options, failure, loads in ways:
        label = f"{way} {hvd_options} {failure.__name__} {loads}"
        straight, job = (Job(way, hvd_options=hvd_options, **WARMING_UP).train(2) for _ in range(2))
        straight.saved()
        saved = job.saved()
        failure(job)
        if loads:
            job.compression.load_state_dict(saved[2])
        else:
            job.compression.reset()
        if way == "a" and "backward_passes_per_step" not in (hvd_options or {}):
            raises(dgc.ConfigError, "build model, optimizer", functools.partial(job.train, 4))
            job.compression.close()
            job, loads = Job(way, hvd_options=hvd_options, **WARMING_UP).load(saved, 2), True
        job.train(4)
        assert torch.equal(flat(job.model), flat(straight.train(4).model)) or not loads, label
        assert_replicas_identical(job.model, label)
        job.compression.close()
        straight.compression.close()


@case
def after_closing_there_is_one_error():
    job = Job().train(1)
    _, _, state = job.saved()
    job.compression.close()
    for call in (saving(job)["average"], lambda: job.compression.load_state_dict(state)):
        on_every_rank(dgc.TransportError, r"after close\(\)", call)


# -- copies ----------------------------------------------------------------------------------------------------------

COPIES = {
    "given": lambda compression: compression,
    "copy": copy.copy,
    "deepcopy": lambda compression: copy.deepcopy({"settings": compression})["settings"],
    "pickle": lambda compression: pickle.loads(pickle.dumps([compression]))[0],
}


@case(how=COPIES)
def a_compressor_can_be_copied_until_it_is_bound(how):
    """As it is by a script that copies its settings, or hands them to a process that it spawns."""
    ends = []
    for make in (COPIES[how], COPIES["given"]):
        model, compression = make_model(), make(dgc.Compression.dgc(sparsity=0.9, exclude=["bias"]))
        train(dgc.DistributedOptimizer(sgd(model), model.named_parameters(), compression=compression), model, 2)
        ends.append(flat(model))
        if make is not COPIES["given"]:
            match = r"load_state_dict\(compression.state_dict"
            raises(TypeError, match, functools.partial(make, compression))
        compression.close()
    assert torch.equal(*ends)
