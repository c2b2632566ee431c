"""What an error that all ranks raise leaves behind, with dgc's optimizer and with DDP's hook, under torchrun."""

import gc
import threading
import weakref

import torch
from adapters_torch.torchrun_tools import loss_of, make_model, on_every_rank
from torch.nn.parallel import DistributedDataParallel
from worker_tools import case

import dgc.torch as dgc


def fail(front):
    """Fail in the second step, on all ranks; returns weak references to the module and the engine."""
    module = make_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    compression = dgc.Compression.dgc(sparsity=0.9)
    if front == "hook":
        model = DistributedDataParallel(module)
        dgc.ddp.register(model, optimizer, compression)
    else:
        model = module
        optimizer = dgc.DistributedOptimizer(optimizer, module.named_parameters(), compression=compression)
    loss_of(model, 0).backward()
    optimizer.step()
    on_every_rank(dgc.ConfigError, "zero_grad", loss_of(model, 1).backward)  # .grad holds a velocity
    return weakref.ref(module), weakref.ref(compression.engine)


@case(front=("dgc", "hook"))
def an_error_keeps_no_model_alive(front):
    """The communication thread keeps the error, but not the frames that it has passed."""
    module, engine = fail(front)
    gc.collect()
    assert module() is None
    assert engine() is None
    for thread in threading.enumerate():
        if thread.name == "dgc-exchange":
            thread.join(10)
            assert not thread.is_alive()
