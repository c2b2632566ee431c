"""Steps within ``torch.compile``, on 2 real ranks: the same bits as without it, for all that exchange gradients."""

import torch
from models import assert_replicas_identical, batch, flat, sgd, wrap
from torch import nn
from worker_tools import case

import dgc.torch as dgc

STEPS = 3


def make_model():
    """More parameters than the compiler keeps traces of one function for."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), *[nn.Linear(64, 64) for _ in range(6)], nn.Linear(64, 10))


def trained(passes, way, compiled, whole):
    """Train; forward and backward pass are one function, which may be compiled, or else the ``whole`` step."""
    torch._dynamo.reset()
    model = make_model()
    options = {"backward_passes_per_step": passes}
    optimizer, compression = wrap(way, model, sgd(model), hvd_options=options, sparsity=0.9)

    def added_up(x, y):
        nn.functional.cross_entropy(model(x), y).backward()

    def step(batches):
        optimizer.zero_grad()
        for x, y in batches:
            added_up(x, y)
        optimizer.step()

    if compiled and whole:
        step = torch.compile(step, backend="eager")
    elif compiled:
        added_up = torch.compile(added_up, backend="eager")
    for number in range(STEPS):
        step([batch(number * passes + each) for each in range(passes)])
    assert_replicas_identical(model, "compiled passes")
    compression.close()
    return flat(model)


@case(way="ab", passes=(1, 2), whole=(False, True))
def compiled_passes_and_steps_of_passes_that_are_added_up(way, passes, whole):
    eager, compiled = (trained(passes, way, how, whole) for how in (False, True))
    assert torch.equal(compiled, eager), (compiled - eager).abs().max()


def by_dgc(model):
    return wrap("b", model, sgd(model), sparsity=0.9)


def of_momentum(model):
    optimizer = dgc.DGCMomentum(model.parameters(), 0.1, 0.9, rampup_begin_step=0, sparsity=[0.9])
    return optimizer, optimizer.compression


def sharded(model):
    shared = dgc.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    return wrap("b", model, shared, sparsity=0.9)


OPTIMIZERS = {"dgc": by_dgc, "momentum": of_momentum, "sharded": sharded}


@case(kind=OPTIMIZERS)
def a_compiled_update(kind):
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = make_model()
        optimizer, compression = OPTIMIZERS[kind](model)
        update = torch.compile(lambda o=optimizer: o.step(), backend="eager") if compiled else optimizer.step
        for number in range(STEPS):
            x, y = batch(number)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            update()
        assert_replicas_identical(model, "compiled")
        compression.close()
        ends.append(flat(model))
    assert torch.equal(*ends), (ends[1] - ends[0]).abs().max()


@case(way="ab")
def hooks_are_untraced(way):
    model, seen = make_model(), []
    optimizer, compression = wrap(way, model, sgd(model), sparsity=0.9)
    submit = compression.engine.submit

    class Seen(dict):
        """Looked at by each hook of Horovod's."""

        def __getitem__(self, key):
            seen.append(torch.compiler.is_compiling())
            return super().__getitem__(key)

    def submitted(*arguments, **options):
        seen.append(torch.compiler.is_compiling())
        return submit(*arguments, **options)

    if way == "a":
        optimizer._allreduce_delay = Seen(optimizer._allreduce_delay)
    else:
        compression.engine.submit = submitted
    torch.compile(lambda x: model(x).sum().backward(), backend="eager")(torch.ones(2, 20))
    assert seen == [False] * len(seen) != []
    optimizer.synchronize()
