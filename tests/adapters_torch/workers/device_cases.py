"""Training on the tensors of GPUs, against the same training on the CPU."""

import horovod.torch as hvd
import torch
from adapters_torch.workers.models import assert_replicas_identical, batch, make_model, wrap
from worker_tools import case

import dgc.torch as dgc

STEPS = 8


def device():
    """This rank's device: the ranks of a host share those that it has."""
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def both(train):
    """``train(device)`` here and on the CPU: replicas agree bit for bit, and the two end where rounding allows."""
    here = device()
    model, kernels = train(here)
    assert kernels in ("cupy", None), f"gradients passed through the host ({kernels})"
    model = model.cpu()
    assert_replicas_identical(model, train.__name__)
    expected, _ = train(torch.device("cpu"))
    for (name, p), e in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.isfinite(p).all(), name
        difference = (p - e).norm() / e.norm()
        assert difference <= 0.05, (name, float(difference))


def steps_of(model, optimizer, place, scaler=None, dtype=None):
    for step in range(STEPS):
        x, y = (t.to(place) for t in batch(step))
        optimizer.zero_grad()
        with torch.autocast(place.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = torch.nn.functional.cross_entropy(model(x).float(), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
            continue
        scaler.scale(loss).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()


def trained(place, way, make=None, scaler=None, dtype=None, width=64, **options):
    model = make_model(width=width).to(place)
    make = make or (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3))
    if scaler is not None:
        options["loss_scale"] = scaler
    optimizer, compression = wrap(way, model, make(model.parameters()), sparsity=0.95, **options)
    steps_of(model, optimizer, place, scaler, dtype)
    kernels = compression.describe()["kernels"]
    compression.close()
    return model, kernels


def way_a(place):
    return trained(place, "a")


def way_b(place):
    return trained(place, "b", rampup_begin_step=3)


def large(place):
    """Its two inner layers travel in sums of a megabyte and more while they are dense."""
    return trained(place, "b", width=600, rampup_begin_step=5)


def clipped(place):
    return trained(place, "b", local_grad_clip_norm=0.5)


def scaled(place):
    scaler = torch.amp.GradScaler(place.type, init_scale=2.0**10, growth_interval=3)
    return trained(place, "b", scaler=scaler, dtype=torch.bfloat16)


def sharded(place):
    return trained(place, "b", lambda p: dgc.ZeroRedundancyOptimizer(p, torch.optim.SGD, lr=0.05, momentum=0.9))


def paddle(place):
    model = make_model().to(place)
    optimizer = dgc.DGCMomentum(
        [p for p in model.parameters() if p.requires_grad], learning_rate=0.05, momentum=0.9, rampup_begin_step=2,
        sparsity=[0.95],
    )  # fmt: skip
    steps_of(model, optimizer, place)
    optimizer.compression.close()
    return model, None


@case
def stock_horovods_optimizer():
    both(way_a)


@case
def our_optimizer_with_dense_steps_first():
    both(way_b)


@case
def dense_steps_of_large_tensors():
    both(large)


@case
def clipped_gradients():
    both(clipped)


@case
def a_grad_scaler_and_mixed_precision():
    both(scaled)


@case
def sharded_optimizers():
    both(sharded)


@case
def paddles_optimizer():
    both(paddle)
