"""DDP's communication hook in DDP itself, Accelerate, the Trainer, Lightning and Fabric: examples on 2 ranks."""

import atexit
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import torch
import torch.distributed as dist
from _digits import digits, make_model
from adapters_torch.torchrun_tools import EXACT, assert_close, assert_identical, digest, gathered, on_every_rank
from torch.utils.data import DataLoader
from worker_tools import case

import dgc.torch as dgc

STEPS = 28  # of an epoch


WARMING_UP = {"sparsity": [0.75, 0.99], "rampup_step": 40, "rampup_begin_step": 5}


def check(train, **arguments):
    """The hook is called in each step; dense at sparsity 0, identical replicas at 0.99."""
    steps = STEPS // arguments.get("accumulate", 1)
    torch.manual_seed(7)
    dense = train(None, epochs=1, **arguments)
    exact, sparse = dgc.Compression.dgc(**EXACT), dgc.Compression.dgc(sparsity=0.99)
    torch.manual_seed(7)
    model = train(exact, epochs=1, **arguments)
    assert exact.stats.steps == steps
    assert_close(model, dense)
    exact.close()
    model = train(sparse, epochs=1, **arguments)
    assert sparse.stats.steps == steps
    assert sparse.stats.last.ratio > 20
    sparse.average()
    assert_identical(model)
    sparse.close()
    return dense


def check_resume(train, feedback="classic", **first_epoch):
    """Two epochs that are saved equal one and one bit for bit, in the middle of a warm-up."""
    folder, ends = shared_folder(), []
    for begun, arguments in enumerate(({"folder": folder}, {"folder": folder, **first_epoch})):
        torch.manual_seed(7 + begun)
        compression = dgc.Compression.dgc(error_feedback=feedback, **WARMING_UP)
        arguments = {k: v.format(folder) if isinstance(v, str) else v for k, v in arguments.items()}
        ends.append(digest(train(compression, epochs=2, **arguments)))
        assert compression.stats.steps == STEPS * (2 - begun)
        assert compression.describe()["step"] == 2 * STEPS
        compression.close()
    assert ends[0] == ends[1]


def shared_folder():
    folder = gathered(tempfile.mkdtemp() if dist.get_rank() == 0 else None)[0]
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@case
def ddp():
    import ddp_digits

    check(ddp_digits.train)


@case
def accelerate():
    import accelerate_digits

    for accumulate in (1, 2):
        dense = check(accelerate_digits.train, accumulate=accumulate)
        assert_close(dense, plain_training(batch=32 * accumulate))
    check_resume(accelerate_digits.train, start=1)


def plain_training(batch):
    """One process on the batches of both ranks, micro-batches put together."""
    model, order = make_model(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9, weight_decay=1e-4)
    for x, y in DataLoader(digits()[0], batch_size=batch, shuffle=True, generator=order, drop_last=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


@case
def trainer():
    import trainer_digits

    check(trainer_digits.train)
    check_resume(trainer_digits.train, "auto", checkpoint=f"{{}}/checkpoint-{STEPS}")


@case
def lightning():
    import lightning_digits

    check(lightning_digits.train)
    check_resume(lightning_digits.train, checkpoint="{}/epoch=0.ckpt")


@case(feedback=("auto", "classic"))
def lightning_resumes_adamw(feedback):
    """Lightning steps by a closure, inside of which a classic compressor begins to take the first moment."""
    import lightning_digits

    adamw = partial(torch.optim.AdamW, lr=1e-3)
    with patch.object(lightning_digits.Classifier, "configure_optimizers", lambda self: adamw(self.parameters())):
        check_resume(lightning_digits.train, feedback, checkpoint="{}/epoch=0.ckpt")


@case
def lightning_with_two_optimizers_is_refused():
    import lightning_digits

    def two(self):
        return [torch.optim.SGD([p], lr=0.04) for p in self.parameters()][:2]

    with patch.object(lightning_digits.Classifier, "configure_optimizers", two):
        with patch.object(lightning_digits.Classifier, "automatic_optimization", False):
            compression = dgc.Compression.dgc()
            on_every_rank(
                dgc.ConfigError, "returns 2 optimizers", lambda: lightning_digits.train(compression, epochs=1)
            )


@case
def fabric():
    import fabric_digits

    check(fabric_digits.train)
    check(fabric_digits.train, accumulate=4)
    check_resume(fabric_digits.train, start=1)
