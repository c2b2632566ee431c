"""dgc's optimizer without a compressor under torch.distributed: the dense baseline; Horovod cannot be imported."""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from adapters_torch.torchrun_tools import (
    Branches,
    assert_close,
    assert_identical,
    dense,
    digest,
    freezing,
    gathered,
    loss_of,
    make_model,
    on_every_rank,
    switching,
    train,
)
from ddp_tools import sgd
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from worker_tools import case

import dgc.torch as dgc


def wrap(model, compression=None, optimizer=None, **arguments):
    optimizer = sgd(model) if optimizer is None else optimizer
    return dgc.DistributedOptimizer(optimizer, model.named_parameters(), compression, **arguments)


def ddp(half=False, steps=6, make=sgd):
    model = DistributedDataParallel(make_model())
    if half:
        model.register_comm_hook(None, fp16_compress_hook)
    train(make(model), model, steps)
    return model.module


def equal(model, other):
    return digest(model) == digest(other)


@case
def training_is_ddps_bit_for_bit():
    """On 2 ranks; on more the order of a sum may differ."""
    for given, half in ((None, False), (dgc.Compression.none, False), (dgc.Compression.fp16, True)):
        model = make_model()
        train(wrap(model, given), model)
        if dist.get_world_size() == 2:
            assert equal(model, ddp(half)), given
        assert_close(model, ddp(half))
        assert_identical(model)
    assert not equal(ddp(), ddp(half=True)), "float16 shows"


@case
def several_buckets_and_types_are_averaged():
    model = make_model()
    model[2].double()
    expected = copy.deepcopy(model)
    with patch("dgc.torch.dense.DEFAULT_BUCKET_BYTES", 5000):
        optimizer = wrap(model)
    for step in range(4):
        for m in (model, expected):
            m.zero_grad()
            x = torch.randn(16, 20, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
            m[4](m[3](m[2](m[1](m[0](x)).double()).float())).square().sum().backward()
        optimizer.synchronize()
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            dist.all_reduce(q.grad)
            torch.testing.assert_close(p.grad, q.grad / dist.get_world_size())
        with optimizer.skip_synchronize():
            optimizer.step()
        expected.load_state_dict(model.state_dict())
    assert_identical(model)


@case
def frozen_and_unused_layers_are_left_alone_as_by_ddp():
    for steps_of in (freezing, switching):
        model = Branches()
        steps_of(model, wrap(model))
        expected = DistributedDataParallel(Branches(), find_unused_parameters=True)
        steps_of(expected, sgd(expected))
        assert_close(model, expected)
        assert_identical(model)


@case
def passes_are_added_up_before_the_exchange():
    model = make_model()
    optimizer = wrap(model, backward_passes_per_step=2)
    train(optimizer, model, passes=2)
    assert_close(model, dense(6, passes=2))
    optimizer.set_backward_passes_per_step(1)
    train(optimizer, model, 2)
    assert_identical(model)


@case
def sums_are_not_divided():
    for op in ("sum", dist.ReduceOp.SUM):
        model = make_model()
        optimizer = wrap(model, op=op)
        loss_of(model, 0).backward()
        own = model[0].weight.grad.clone()
        optimizer.synchronize()
        dist.all_reduce(own)
        torch.testing.assert_close(model[0].weight.grad, own)


@case
def horovods_methods_and_a_closure():
    model, expected = make_model(), make_model()
    optimizer, plain = wrap(model), wrap(expected)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        optimizer.synchronize()  # averages nothing again
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()

        def closure(step=step):
            plain.zero_grad()
            loss = loss_of(expected, step)
            loss.backward()
            plain.synchronize()
            nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
            return loss

        assert plain.step(closure) is not None
    assert equal(model, expected)
    assert_identical(model)
    assert optimizer.compression is dgc.Compression.none
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(optimizer)


@case
def a_closure_that_does_not_synchronize():
    model = make_model()
    lbfgs = wrap(model, optimizer=torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))

    def closure():
        lbfgs.zero_grad()
        loss = loss_of(model, 1)
        loss.backward()
        return loss

    lbfgs.step(closure)
    assert len(set(gathered(digest([p.grad for p in model.parameters()])))) == 1


@case
def changes_while_gradients_are_exchanged_are_refused():
    for change in (
        lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda model, _: setattr(model[0].weight, "grad", model[0].weight.grad.clone()),
        lambda model, _: setattr(model[0].weight, "grad", None),
    ):
        model = make_model()
        optimizer = wrap(model)
        loss_of(model, 0).backward()
        change(model, optimizer)
        on_every_rank(dgc.LayoutError, "while it was exchanged", optimizer.step)
    optimizer = wrap(model := make_model())
    loss_of(model, 0).backward()
    with pytest.raises(AssertionError, match=r"before optimizer\.step\(\)"):
        optimizer.zero_grad()
    optimizer.step()


@case
def a_scaler_unscales_after_synchronize():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = make_model()
    optimizer = wrap(model)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    assert_close(model, ddp(steps=3))
    scaler.scale(loss_of(model, 0)).backward()
    on_every_rank(dgc.LayoutError, "while it was exchanged", lambda: scaler.step(optimizer))


@case
def what_the_ranks_do_not_share_is_refused():
    first = dist.get_rank() == 0
    for one, other in (
        (dgc.Compression.fp16, None),
        (None, dgc.Compression.dgc()),
        (dgc.Compression.topk(), dgc.Compression.none),
    ):
        own = one if first else other
        on_every_rank(dgc.ConfigError, "'algorithm' is ", lambda own=own: wrap(make_model(), own))
    on_every_rank(dgc.ConfigError, "'op' is ", lambda: wrap(make_model(), op="sum" if first else "average"))
    on_every_rank(dgc.LayoutError, "parameters differ", lambda: wrap(make_model(width=64 if first else 32)))
    model = make_model()
    train(wrap(model), model)
    assert_identical(model)


@case
def arguments_that_mean_nothing_here_are_refused():
    model = make_model()
    for arguments, match in (
        ({"op": "max"}, "op is 'max'"),
        ({"num_groups": 2}, "groups"),
        ({"process_set": object()}, "process_set= is Horovod's"),
        ({"gradient_predivide_factor": 2.0, "op": "sum"}, "gradient_predivide_factor"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
    ):
        on_every_rank(dgc.ConfigError, match, lambda arguments=arguments: wrap(model, **arguments))

    class Own:
        compress = decompress = None

    on_every_rank(dgc.ConfigError, "needs Horovod", lambda: wrap(model, Own))
    embedding = nn.Sequential(nn.Embedding(8, 4, sparse=True))
    for as_dense in (False, True):
        plain = torch.optim.SGD(embedding.parameters(), lr=0.1)
        optimizer = wrap(embedding, optimizer=plain, sparse_as_dense=as_dense)
        backward = embedding(torch.arange(3) + dist.get_rank()).sum().backward
        if as_dense:
            backward()
            optimizer.step()
        else:
            on_every_rank(dgc.ConfigError, "sparse_as_dense=True", backward)
    assert_identical(embedding)


@case
def a_group_of_ranks_exchanges_alone():
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    expected = make_model()
    train(sgd(expected), expected)
    for others in (0, 1):  # alone in the group, or outside of it
        model = make_model()
        train(wrap(model, group=groups[(dist.get_rank() + others) % dist.get_world_size()]), model)
        assert equal(model, expected)


@case
def another_wrapping_ends_the_first():
    model = make_model()
    first = wrap(model)
    train(first, model, 1)
    second = wrap(model)
    train(second, model, 2)
    on_every_rank(dgc.ConfigError, "was wrapped since", first.step)
    third = wrap(model, dgc.Compression.dgc())
    train(third, model, 2)
    on_every_rank(dgc.ConfigError, "was wrapped since", second.step)
    third.compression.close()
