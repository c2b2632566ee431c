"""On real ranks: a saved and loaded run with a schedule of rate or momentum goes on as if nothing had happened."""

import shutil

import horovod.torch as hvd
import torch
from adapters_torch.workers.models import flat, shared_folder
from torch.optim import lr_scheduler
from worker_tools import case

import dgc.torch as dgc

STEPS, CUT = 6, 3

SCHEDULES = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, base_momentum=0.7, max_momentum=0.95),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "momentum by hand": lambda o: ByHand(o),
}


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


class Run:
    """A model of two tensors in training, one of them sparsified."""

    def __init__(self, way, algorithm, schedule, seed=0):
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(16, 16)
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        make = getattr(dgc.Compression, algorithm)
        options = {} if algorithm == "qsgd" else {"sparsity": 0.9}
        options["min_numel"] = 64
        if way == "a":
            self.compression = make(self.model.named_parameters(), optimizer=sgd, **options)
            wrap = hvd.DistributedOptimizer
        else:
            self.compression = make(**options)
            wrap = dgc.DistributedOptimizer
        self.optimizer = wrap(sgd, self.model.named_parameters(), compression=self.compression)
        self.scheduler = SCHEDULES[schedule](self.optimizer)

    def step(self, number, at_end=lambda moment: None):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * number + hvd.rank()))
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        at_end("before")
        self.schedule()
        at_end("after")

    def schedule(self):
        plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
        self.scheduler.step(1.0) if plateau else self.scheduler.step()

    def objects(self):
        return dict(model=self.model, optimizer=self.optimizer, compression=self.compression)


def check(way, algorithm, schedule, moments):
    """Save at these moments of a step, and go on from each of them with objects of their own."""
    folder = shared_folder("schedules")
    straight = Run(way, algorithm, schedule)

    def save(moment):
        if moment in moments:
            dgc.save_checkpoint(folder / moment, **straight.objects(), extra=straight.scheduler.state_dict())

    for number in range(STEPS):
        straight.step(number, save if number == CUT - 1 else lambda moment: None)
    straight.compression.close()
    for moment in moments:
        resumed = Run(way, algorithm, schedule, seed=1)
        resumed.scheduler.load_state_dict(dgc.load_checkpoint(folder / moment, **resumed.objects()))
        if moment == "before":
            resumed.schedule()
        for number in range(CUT, STEPS):
            resumed.step(number)
        resumed.compression.close()
        assert torch.equal(flat(resumed.model), flat(straight.model)), moment
    hvd.barrier()
    if hvd.rank() == 0:
        shutil.rmtree(folder)


@case(way="ab", algorithm=("dgc", "topk", "qsgd"), schedule=("CyclicLR", "OneCycleLR", "momentum by hand"))
def a_schedule_of_momentum_goes_on_from_a_checkpoint(way, algorithm, schedule):
    check(way, algorithm, schedule, ("after", "before"))


@case(schedule=("LambdaLR", "ReduceLROnPlateau"))
def a_schedule_of_the_rate_goes_on_from_a_checkpoint(schedule):
    """The rate is the optimizer's own matter."""
    check("b", "dgc", schedule, ("after",))


@case
def stock_horovod_may_wrap_the_optimizer_after_the_checkpoint_was_loaded():
    """In the middle of an epoch, with options that were set by hand since the optimizer was built."""
    folder = shared_folder("early")
    straight = Run("a", "dgc", "momentum by hand")
    for number in range(STEPS):
        if number == CUT:
            dgc.save_checkpoint(folder, **straight.objects(), extra=straight.scheduler.state_dict())
        straight.step(number)
    straight.compression.close()

    resumed = Run.__new__(Run)
    resumed.model = torch.nn.Linear(16, 16)
    sgd = torch.optim.SGD(resumed.model.parameters(), lr=0.3, momentum=0.1)
    named = list(resumed.model.named_parameters())
    resumed.compression = dgc.Compression.dgc(named, optimizer=sgd, sparsity=0.9, min_numel=64)
    extra = dgc.load_checkpoint(folder, model=resumed.model, optimizer=sgd, compression=resumed.compression)
    resumed.optimizer = hvd.DistributedOptimizer(sgd, named, compression=resumed.compression)
    resumed.scheduler = ByHand(resumed.optimizer)
    resumed.scheduler.load_state_dict(extra)
    for number in range(CUT, STEPS):
        resumed.step(number)
    assert torch.equal(flat(resumed.model), flat(straight.model))
    resumed.compression.close()
    hvd.barrier()
    if hvd.rank() == 0:
        shutil.rmtree(folder)
