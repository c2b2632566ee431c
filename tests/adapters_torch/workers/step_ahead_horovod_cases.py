"""Updates are exchanged with Horovod's own optimizer ("a") and with dgc's ("b"), on real ranks."""

import horovod.torch as hvd
import torch
from models import assert_replicas_identical, dense_reference, loss_of, make_model, sgd, train, worst_difference, wrap
from torch import nn
from worker_tools import case

AHEAD = {"error_feedback": "step-ahead"}
EXACT = {**AHEAD, "sparsity": 0.0, "values": "float32", "small": "float32"}
SPARSE = {**AHEAD, "sparsity": 0.95}


@case(way="ab")
def sgd_at_sparsity_0_equals_dense_training(way):
    model = make_model()
    expected = dense_reference(model, 12, momentum=0.9, weight_decay=0.01)
    optimizer, _ = wrap(way, model, sgd(model, weight_decay=0.01), **EXACT)
    train(optimizer, model, 12)
    assert worst_difference(model, expected) <= 1e-5
    assert_replicas_identical(model)


@case(way="ab")
def horovods_recipe_for_clipping_clips_the_gradient(way):
    """Momentum stays in the optimizer, so the clipped norm is that of the rank's gradient in every step."""
    model = make_model()
    optimizer, compression = wrap(way, model, sgd(model, weight_decay=0.01), **SPARSE)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        alone = make_model()
        alone.load_state_dict(model.state_dict())
        loss_of(alone, step).backward()
        own = torch.stack([p.grad.norm() for p in alone.parameters() if p.grad is not None]).norm()
        torch.testing.assert_close(norm, own)
        with optimizer.skip_synchronize():
            optimizer.step()
    compression.average()
    assert_replicas_identical(model)


@case(way="ab")
def a_gradient_that_overflows_on_one_rank_makes_no_rank_wait(way):
    model = make_model()
    optimizer, compression = wrap(way, model, sgd(model), **SPARSE)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(6):
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(model, step))
        (loss * (torch.inf if step == 3 and hvd.rank() == 1 else 1.0)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**9 or (way == "b" and hvd.rank() != 1)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    compression.average()
    assert_replicas_identical(model)


@case(way="ab")
def rank_0_loads_and_broadcasts(way):
    """Horovod's documented resume: the other ranks step an optimizer without state before they receive the state."""
    before = make_model()
    plain = sgd(before, weight_decay=0.01)
    loss_of(before, 0, rank=0).backward()
    plain.step()
    model = make_model(1 + hvd.rank())
    optimizer = sgd(model, weight_decay=0.01)
    if hvd.rank() == 0:
        model.load_state_dict(before.state_dict())
        optimizer.load_state_dict(plain.state_dict())
    optimizer, compression = wrap(way, model, optimizer, **SPARSE)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert_replicas_identical(model)
    train(optimizer, model, 4, start=1)
    compression.average()
    assert_replicas_identical(model)


@case
def passes_of_an_accumulation_are_one_update():
    model = make_model()
    optimizer, compression = wrap("a", model, sgd(model), hvd_options={"backward_passes_per_step": 2}, **SPARSE)
    for step in range(4):
        optimizer.zero_grad()
        for i in range(2):
            loss_of(model, 2 * step + i).backward()
        optimizer.step()
    assert compression.stats.steps == 4
    compression.average()
    assert_replicas_identical(model)
