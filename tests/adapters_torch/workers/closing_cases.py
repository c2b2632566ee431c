"""What ``compression.close()`` leaves behind, with dgc's optimizer and with DDP's hook, under torchrun."""

import copy

from adapters_torch.torchrun_tools import digest, loss_of, on_every_rank
from ddp_tools import Run, sgd, train
from torch.nn.parallel import DistributedDataParallel
from worker_tools import case

import dgc.torch as dgc


def closed(front):
    """The module, what was trained, and its optimizer, after three steps and ``close()`` in the middle of a fourth."""
    run = Run(front, sgd, sparsity=0.9).train(range(3))
    run.backward(3)
    run.compression.close()
    run.optimizer.zero_grad()
    return run.module, run.model, run.optimizer


@case(front=("dgc", "hook"), then=("alone", "in DDP"))
def the_model_trains_as_one_that_was_never_compressed(front, then):
    module, _, _ = closed(front)
    never = copy.deepcopy(module)
    for each in (module, never):
        train(DistributedDataParallel(each) if then == "in DDP" else each, sgd(each), 4, start=4)
    assert digest(module) == digest(never)


@case
def the_hooks_optimizer_is_a_plain_one_again():
    module, _, optimizer = closed("hook")
    never = copy.deepcopy(module)
    train(module, optimizer, 4, start=4)
    train(never, sgd(never), 4, start=4)
    assert digest(module) == digest(never)


@case
def gradients_that_nobody_averages_are_an_error():
    module, _, optimizer = closed("dgc")
    before = digest(module)
    on_every_rank(dgc.ConfigError, "was closed.*build a new optimizer", lambda: train(module, optimizer, 1, start=4))
    assert digest(module) == before
    module, ddp, _ = closed("hook")
    on_every_rank(dgc.TransportError, "was closed", lambda: loss_of(ddp, 4).backward())
    assert digest(module) == before
