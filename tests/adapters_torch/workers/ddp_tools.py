"""Models in training under torchrun: with DDP's communication hook, with dgc's optimizer, or dense."""

import torch
from adapters_torch.torchrun_tools import EXACT, SGD, loss_of, make_model
from torch.nn.parallel import DistributedDataParallel
from worker_tools import close_later

import dgc.torch as dgc

LEFT = {**EXACT, "momentum": 0.0, "weight_decay": 0.0}  # momentum and decay stay in the optimizer


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{**SGD, **options})


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def hooked(module, make_optimizer=sgd, options=None, **ddp):
    """A DDP model with the hook, its optimizer, and the state."""
    model = DistributedDataParallel(module, **ddp)
    optimizer = make_optimizer(model)
    compression = close_later(dgc.Compression.dgc(**(EXACT if options is None else options)))
    return model, optimizer, dgc.ddp.register(model, optimizer, compression)


def dense(module, make_optimizer=sgd, **ddp):
    model = DistributedDataParallel(module, **ddp)
    return model, make_optimizer(model)


def train(model, optimizer, steps=20, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


class Run:
    """A model in training by dgc's optimizer ("dgc"), DDP's hook ("hook") or DDP alone ("dense")."""

    def __init__(self, front, make_optimizer, seed=0, **options):
        self.module = self.model = make_model(seed)
        self.optimizer = make_optimizer(self.module)
        self.compression = close_later(dgc.Compression.dgc(**options))
        if front == "dgc":
            named = self.module.named_parameters()
            self.optimizer = dgc.DistributedOptimizer(self.optimizer, named, compression=self.compression)
            return
        self.model = DistributedDataParallel(self.module)
        if front == "hook":
            dgc.ddp.register(self.model, self.optimizer, self.compression)

    def backward(self, step):
        self.optimizer.zero_grad()
        loss = loss_of(self.model, step)
        loss.backward()
        return loss

    def train(self, steps, *closure):
        for step in steps:
            self.backward(step)
            self.optimizer.step(*closure)
        return self
