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
    assert_replicas_identical(model)
    expected, _ = train(torch.device("cpu"))
    for (name, p), e in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.isfinite(p).all(), name
        difference = (p - e).norm() / e.norm()
        assert difference <= 0.05, (name, float(difference))


def steps_of(model, optimizer, place, scaler=None):
    for step in range(STEPS):
        x, y = (t.to(place) for t in batch(step))
        optimizer.zero_grad()
        with torch.autocast(place.type, dtype=torch.bfloat16, enabled=scaler is not None):
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


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def sharded(parameters):
    return dgc.ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.05, momentum=0.9)


KINDS = {
    "Horovods optimizer": ("a", {}),
    "dense steps first": ("b", {"rampup_begin_step": 3}),
    # The two inner layers travel in sums of a megabyte and more while they are dense.
    "dense steps of large tensors": ("b", {"width": 600, "rampup_begin_step": 5}),
    "clipped gradients": ("b", {"local_grad_clip_norm": 0.5}),
    "a scaler and mixed precision": ("b", {"scales": True}),
    "a sharded optimizer": ("b", {"make": sharded}),
}


@case(kind=KINDS)
def training_equals_that_on_the_cpu(kind):
    way, given = KINDS[kind]

    def trained(place, make=sgd, scales=False, width=64, **options):
        model = make_model(width=width).to(place)
        scaler = torch.amp.GradScaler(place.type, init_scale=2.0**10, growth_interval=3) if scales else None
        if scales:
            options["loss_scale"] = scaler
        optimizer, compression = wrap(way, model, make(model.parameters()), sparsity=0.95, **options)
        steps_of(model, optimizer, place, scaler)
        kernels = compression.describe()["kernels"]
        compression.close()
        return model, kernels

    both(lambda place: trained(place, **given))


@case
def paddles_optimizer_equals_that_on_the_cpu():
    def trained(place):
        model = make_model().to(place)
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = dgc.DGCMomentum(trainable, 0.05, 0.9, rampup_begin_step=2, sparsity=[0.95])
        steps_of(model, optimizer, place)
        optimizer.compression.close()
        return model, None

    both(trained)
