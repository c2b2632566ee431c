"""Steps within ``torch.compile``, on 2 real ranks: the same bits as without it, for all that exchange gradients."""

import numpy as np
import torch
from models import assert_replicas_identical, batch, flat, sgd, wrap
from torch import nn
from worker_tools import case

import dgc.torch as dgc
from dgc.torch.untraced import untraced

STEPS = 3


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))


def trained(make, compiled):
    """Train a small model, each step by a function that ``compiled`` makes of one; returns the parameters.

    Args:
        make: returns the optimizer and what is to be closed afterwards, for a model.
        compiled: is given the model, the optimizer and a whole step, and returns that step's stand-in.
    """
    model = small_model()
    optimizer, closed = make(model)

    def whole(x, y):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    step = compiled(model, optimizer, whole)
    for number in range(STEPS):
        step(*batch(number))
    assert_replicas_identical(model, "compiled")
    if closed is not None:
        closed.close()
    return flat(model)


def as_it_is(model, optimizer, whole):
    return whole


def whole_step(model, optimizer, whole):
    return torch.compile(whole, backend="eager")


def update_alone(model, optimizer, whole):
    update = torch.compile(lambda: optimizer.step(), backend="eager")

    def step(x, y):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        update()

    return step


def deep_model():
    """More parameters than the compiler keeps traces of one function for."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 16), *[nn.Linear(16, 16) for _ in range(6)], nn.Linear(16, 10))


def passes_alone(passes, way, compiled, whole=False):
    """Train a deep model; forward and backward pass are one function, with ``whole`` the step is in it, too."""
    torch._dynamo.reset()
    model = deep_model()
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


def require_same(make, *ways):
    expected = trained(make, as_it_is)
    for way in ways:
        torch._dynamo.reset()
        actual = trained(make, way)
        assert torch.equal(actual, expected), f"{way.__name__}: {(actual - expected).abs().max()}"


@case
def a_compiled_step():
    require_same(lambda model: wrap("a", model, sgd(model), sparsity=0.9), whole_step)
    require_same(lambda model: wrap("b", model, sgd(model), sparsity=0.9), whole_step, update_alone)


@case(way="ab", passes=(1, 2), whole=(False, True))
def compiled_passes_and_steps_of_passes_that_are_added_up(way, passes, whole):
    eager, compiled = (passes_alone(passes, way, how, whole) for how in (False, True))
    assert torch.equal(compiled, eager), (compiled - eager).abs().max()


@case
def hooks_of_horovod_are_untraced():
    model = small_model()
    optimizer, compression = wrap("a", model, sgd(model), sparsity=0.9)
    seen = []
    optimizer._allreduce_delay = Seen(seen, optimizer._allreduce_delay)
    torch.compile(lambda x: model(x).sum().backward(), backend="eager")(torch.ones(2, 20))
    assert seen == [False] * len(seen) != []
    optimizer.synchronize()
    compression.close()


@case
def hooks_of_dgcs_optimizer_are_untraced():
    model = small_model()
    optimizer, compression = wrap("b", model, sgd(model), sparsity=0.9)
    seen, submit = [], compression.engine.submit

    def looked(*arguments, **options):
        seen.append(torch.compiler.is_compiling())
        return submit(*arguments, **options)

    compression.engine.submit = looked
    torch.compile(lambda x: model(x).sum().backward(), backend="eager")(torch.ones(2, 20))
    assert seen == [False] * len(seen) != []
    optimizer.synchronize()
    compression.close()


class Seen(dict):
    """Looked at by each hook; notes whether the compiler runs it."""

    def __init__(self, seen, values):
        super().__init__(values)
        self._seen = seen

    def __getitem__(self, key):
        self._seen.append(torch.compiler.is_compiling())
        return super().__getitem__(key)


@case
def a_compiled_step_of_momentum():
    def make(model):
        optimizer = dgc.DGCMomentum(model.parameters(), 0.1, 0.9, rampup_begin_step=0, sparsity=[0.9])
        return optimizer, optimizer.compression

    require_same(make, update_alone)


@case
def a_compiled_step_of_a_sharded_optimizer():
    def make(model):
        shared = dgc.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        return wrap("b", model, shared, sparsity=0.9)

    require_same(make, update_alone)


@case
def what_is_untraced_runs_as_it_is():
    seen = []

    @untraced
    def copied(values):
        seen.append(torch.compiler.is_compiling())
        out = np.empty(2, np.float32)
        np.copyto(out, values.numpy())  # which a compiled function cannot
        return torch.from_numpy(out)

    doubled = torch.compile(lambda values: copied(values * 2) + 1, backend="eager")
    assert doubled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert seen == [False]
