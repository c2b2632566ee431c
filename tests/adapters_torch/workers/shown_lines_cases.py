"""The lines of start.md and pytorch.md under torchrun, with a small model."""

import atexit
import shutil
import sys
import tempfile
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from adapters_torch.torchrun_tools import assert_identical, digest, gathered
from documented import shown
from torch import nn
from worker_tools import case, close_later

import dgc.torch as dgc


def batch(step):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def begun(make=torch.optim.SGD, **options):
    """What the lines call model, optimizer and compression."""
    torch.manual_seed(0)
    model, compression = nn.Linear(64, 64), close_later(dgc.Compression.dgc(**options))
    optimizer = dgc.DistributedOptimizer(make(model.parameters(), lr=0.01), model.named_parameters(), compression)
    return {"model": model, "optimizer": optimizer, "compression": compression, "torch": torch, "dist": dist}


def train(names, steps):
    for step in steps:
        names["optimizer"].zero_grad()
        names["model"](batch(step)).square().mean().backward()
        names["optimizer"].step()
    return names["model"]


@case
def the_first_ones():
    (code,) = shown("start.md", "PyTorch with torchrun")
    initialises = 'dist.init_process_group("gloo")'  # which living ranks have done
    assert initialises in code
    names = {"total_steps": 3}
    exec(code.replace(initialises, ""), names)
    assert_identical(train(names, range(3)))
    names["optimizer"].compression.close()


@case
def those_of_mixed_precision():
    (code,) = shown("pytorch.md", "Mixed precision")
    scaler = torch.amp.GradScaler("cpu")
    names = begun(loss_scale=scaler)
    for step in range(3):
        names["optimizer"].zero_grad()
        exec(code, {**names, "scaler": scaler, "loss": names["model"](batch(step)).square().mean()})
    assert_identical(names["model"])
    assert names["compression"].stats.steps == 3


@case(feedback=("step-ahead", "classic"))
def those_of_checkpoints_resume_bit_for_bit(feedback):
    folder = gathered(tempfile.mkdtemp() if dist.get_rank() == 0 else None)[0]
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    save, load, _ = (code.replace("checkpoint.pt", f"{folder}/own.pt") for code in shown("pytorch.md", "Checkpoints"))
    options = {"steps": 6, "min_numel": 64, "error_feedback": feedback}
    unbroken, resumed = begun(torch.optim.AdamW, **options), begun(torch.optim.AdamW, **options)
    train(unbroken, range(3))
    exec(save, unbroken)
    dist.barrier()
    exec(load, resumed)
    assert digest(train(resumed, range(3, 5))) == digest(train(unbroken, range(3, 5)))
    assert not torch.equal(resumed["model"].weight, resumed["saved"]["model"]["weight"]), "it has not moved"
    assert_identical(train(resumed, range(5, 6)))  # the last of steps= makes the ranks equal


@case
def those_of_tensorboard_write_the_steps_figures():
    (code,) = shown("pytorch.md", "TensorBoard")
    wrote, logged, rank = [], [], dist.get_rank()
    tensorboard = SimpleNamespace(
        SummaryWriter=lambda folder: SimpleNamespace(add_scalar=lambda *scalar: wrote.append(scalar))
    )
    plain, watched = begun(sparsity=0.9), begun(sparsity=0.9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
        exec(code, {**watched, "rank": rank})
    watched["compression"].on_step(logged.append)
    assert digest(train(watched, range(3))) == digest(train(plain, range(3))), "a hook changes a bit"
    assert (len(logged), logged[0]["step"], logged[0]["refused"], logged[0]["bytes_sent"] > 0) == (3, 0, False, True)
    assert set(logged[0]["seconds"]) == {"compress", "exchange", "apply", "wait", "write"}
    if rank != 0:
        assert not wrote
        return
    each = ("ratio", "density", "bytes_sent")
    expected = [(f"compression/{name}", step) for step in range(3) for name in each]
    expected.insert(3, ("compression/residual_norm", 0))
    assert [(tag, step) for tag, _, step in wrote] == expected
    values, last = {tag: value for tag, value, _ in wrote}, watched["compression"].stats.last
    assert [values[f"compression/{name}"] for name in each] == [last.ratio, last.density, last.bytes_sent]
    assert values["compression/residual_norm"] > 0
