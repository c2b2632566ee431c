"""On real ranks: the sharded optimizer inside Horovod's and dgc's distributed optimizers, and over process sets."""

import horovod.torch as hvd
import numpy as np
import torch
from adapters_torch.workers.models import loss_of, make_model, train, worst_difference, wrap
from adapters_torch.workers.tensors import assert_bits_equal, assert_replicas_identical, raises
from torch import nn
from worker_tools import case

import dgc.torch as dgc
from dgc.errors import ConfigError

Zero = dgc.ZeroRedundancyOptimizer
OPTIMIZERS = {
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}
hvd.init()


def horovods(model, optimizer):
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def trained(make_optimizer, steps=8, **kwargs):
    model = make_model(**kwargs)
    optimizer = make_optimizer(model)
    train(optimizer, model, steps)
    assert_replicas_identical(model.parameters())
    return model, optimizer


@case(optimizer=OPTIMIZERS, view=(False, True))
def inside_horovods_optimizer(optimizer, view):
    cls, options = OPTIMIZERS[optimizer]
    expected, _ = trained(lambda m: horovods(m, cls(m.parameters(), **options)))
    actual, zero = trained(lambda m: horovods(m, Zero(m.parameters(), cls, parameters_as_bucket_view=view, **options)))
    assert_bits_equal(actual.parameters(), expected.parameters())
    assert isinstance(zero, Zero)
    assert isinstance(zero.optim, cls)
    assert len(zero.optim.state) < len(list(actual.parameters()))


@case
def state_loaded_before_wrapping_is_kept():
    model, optimizer = trained(lambda m: horovods(m, torch.optim.Adam(m.parameters(), lr=0.01)), 3)
    resumed = make_model(seed=5)
    resumed.load_state_dict(model.state_dict())
    zero = Zero(resumed.parameters(), torch.optim.Adam, lr=0.01)
    zero.load_state_dict(optimizer.state_dict())
    distributed = horovods(resumed, zero)
    for opt, m in ((optimizer, model), (distributed, resumed)):
        train(opt, m, 3, start=3)
    assert_bits_equal(resumed.parameters(), model.parameters())
    distributed.consolidate_state_dict(to=0)
    if hvd.rank() == 0:
        whole = distributed.state_dict()
        for key, entry in optimizer.state_dict()["state"].items():
            assert torch.equal(entry["exp_avg"], whole["state"][key]["exp_avg"])


@case(early=(False, True))
def schedulers_made_before_or_after_wrapping(early):
    model, reference = make_model(), make_model()
    zero = Zero(model.parameters(), torch.optim.SGD, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(zero, 2, 0.5) if early else None
    optimizer = horovods(model, zero)
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    plain = horovods(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    other = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    train(optimizer, model, 5, after=lambda step: scheduler.step())
    train(plain, reference, 5, after=lambda step: other.step())
    assert_bits_equal(model.parameters(), reference.parameters())


@case
def a_closure_is_refused_inside_horovods_optimizer():
    """Its gradients would not be averaged; a closure that was called before the step is as good."""
    model, reference = make_model(), make_model()
    optimizer = horovods(model, Zero(model.parameters(), torch.optim.SGD, lr=0.1))
    train(horovods(reference, torch.optim.SGD(reference.parameters(), lr=0.1)), reference, 3)
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        before = [p.detach().clone() for p in model.parameters()]
        if step == 1:
            with optimizer.skip_synchronize():
                raises(ConfigError, "call the closure, then step", lambda: optimizer.step(closure))
            assert_bits_equal(model.parameters(), before)
        assert closure().item() > 0
        optimizer.step()
    assert_bits_equal(model.parameters(), reference.parameters())


@case
def grad_scaler_skips_the_same_step_everywhere():
    def run(make):
        model = make_model()
        optimizer = make(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(5):
            optimizer.zero_grad()
            # The overflow arises within backward: afterwards the exchange may already be under way.
            overflow = model.last.weight.register_hook(lambda grad: grad * float("inf"))
            if step != 2 or hvd.rank() != 1:
                overflow.remove()
            scaler.scale(loss_of(model, step)).backward()
            overflow.remove()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
        return list(model.parameters())

    sgd = dict(lr=0.05, momentum=0.9)
    expected = run(lambda m: horovods(m, torch.optim.SGD(m.parameters(), **sgd)))
    actual = run(lambda m: horovods(m, Zero(m.parameters(), torch.optim.SGD, **sgd)))
    assert_bits_equal(actual, expected)
    assert_replicas_identical(actual)


@case
def a_group_that_would_not_be_averaged_is_refused():
    for make in (
        horovods,
        lambda m, zero: dgc.DistributedOptimizer(zero, m.named_parameters(), compression=dgc.Compression.dgc()),
    ):
        model = make_model()
        optimizer = make(model, Zero(model.parameters(), torch.optim.SGD, lr=0.1))
        group = {"params": [nn.Parameter(torch.zeros(5))]}
        raises(ConfigError, "add_param_group before wrapping", lambda: optimizer.add_param_group(group))  # noqa: B023
        train(optimizer, model, 2)
        assert_replicas_identical(model.parameters())


@case(way="ab", view=(False, True))
def with_dgc_it_equals_the_unsharded_run(way, view):
    """Same exchange, same momentum in the compressor, same bits."""
    sgd, states = dict(lr=0.05, momentum=0.9, weight_decay=1e-3), []
    models = expected, model = make_model(), make_model()
    zero = Zero(model.parameters(), torch.optim.SGD, parameters_as_bucket_view=view, **sgd)
    for each, inner in zip(models, (torch.optim.SGD(expected.parameters(), **sgd), zero), strict=True):
        optimizer, compression = wrap(way, each, inner, sparsity=0.95, rampup_begin_step=2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=12)
        train(optimizer, each, 10, after=lambda step, scheduler=scheduler: scheduler.step())
        states.append(compression.state_dict(own=True)["parameters"])
    assert_bits_equal(model.parameters(), expected.parameters())
    assert_replicas_identical(model.parameters())
    assert optimizer.param_groups[0]["momentum"] > 0.8
    assert not any(s.get("momentum_buffer") is not None for s in optimizer.optim.state.values())
    for ours, theirs in zip(states[1].values(), states[0].values(), strict=True):
        np.testing.assert_array_equal(ours["u"], theirs["u"])


@case(way="ab")
def with_dgc_a_dense_checkpoints_momentum_reaches_every_rank(way):
    sgd = dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    model, dense = trained(lambda m: horovods(m, torch.optim.SGD(m.parameters(), **sgd)), 6)
    checkpoint = dense.state_dict()
    resumed = make_model(seed=5)
    resumed.load_state_dict(model.state_dict())
    zero, _ = wrap(way, resumed, Zero(resumed.parameters(), torch.optim.SGD, **sgd), rampup_begin_step=1000)
    zero.load_state_dict(checkpoint)
    train(dense, model, 5, start=6)
    train(zero, resumed, 5, start=6)
    assert worst_difference(resumed, model) <= 1e-6
    assert not any("momentum_buffer" in s for s in zero.optim.state.values())


@case("4ranks")
def over_process_sets():
    pairs = [hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])]
    mine = pairs[hvd.rank() % 2]
    p = nn.Parameter(torch.full((6,), float(hvd.rank())))
    q = nn.Parameter(torch.full((5,), float(hvd.rank())))
    zero = Zero([p, q], torch.optim.SGD, group=mine, lr=1.0)
    p.grad, q.grad = torch.ones(6), torch.ones(5)
    zero.step()
    first, second = mine.ranks
    assert (p[0].item(), q[0].item()) == (first - 1.0, second - 1.0)
    raises(ConfigError, "is not in", lambda: Zero([p], torch.optim.SGD, group=pairs[1 - hvd.rank() % 2], lr=1.0))
    model = make_model()
    optimizer = horovods(model, Zero(model.parameters(), torch.optim.SGD, group=mine, lr=0.1))
    loss_of(model, 0).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        raises(ConfigError, "give both the same process set", optimizer.step)
    hvd.barrier()
