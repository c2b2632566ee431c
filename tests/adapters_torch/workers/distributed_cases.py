"""torch.distributed carries the bytes, on 2 real ranks; Horovod and mpi4py cannot be imported."""

import datetime
import sys
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist
from adapters_torch.torchrun_tools import (
    EXACT,
    SGD,
    Branches,
    assert_close,
    assert_frozen,
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
from adapters_torch.workers.tensors import raises
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worker_tools import case, close_later

import dgc.torch as dgc
from dgc.torch.distributed import DistributedTransport


def wrap(model, optimizer=None, passes=1, group=None, **options):
    compression = close_later(dgc.Compression.dgc(**options))
    optimizer = dgc.DistributedOptimizer(
        optimizer or torch.optim.SGD(model.parameters(), **SGD),
        model.named_parameters(),
        compression=compression,
        backward_passes_per_step=passes,
        group=group,
    )
    return optimizer, compression


@case(passes=(1, 2))
def training_equals_dense_at_sparsity_0(passes):
    model = make_model()
    optimizer, compression = wrap(model, passes=passes, **EXACT)
    train(optimizer, model, 20, passes=passes)
    assert_close(model, dense(20, passes))
    assert_identical(model)
    assert compression.describe()["transport"] == "torch.distributed"
    assert not [name for name in sys.modules if name.partition(".")[0] in ("horovod", "mpi4py")]


LAYERS = {"frozen": freezing, "unused": switching}
OPTIMIZERS = {
    "SGD": (lambda m: torch.optim.SGD(m.parameters(), **SGD), {}),
    "SGD before the rampup": (lambda m: torch.optim.SGD(m.parameters(), **SGD), {"rampup_begin_step": 8}),
    "AdamW": (lambda m: torch.optim.AdamW(m.parameters()), {"momentum": 0.0}),
}


@case(layers=LAYERS, kind=OPTIMIZERS)
def frozen_and_unused_layers_are_left_alone_as_by_ddp(layers, kind):
    steps_of, (make, options) = LAYERS[layers], OPTIMIZERS[kind]
    model = Branches()
    optimizer, _ = wrap(model, make(model), **EXACT, **options)
    steps_of(model, optimizer)
    expected = DistributedDataParallel(Branches(), find_unused_parameters=True)
    steps_of(expected, make(expected))
    assert_close(model, expected)
    assert_identical(model)


SENT = {"plain": {}, "each by itself": {"small": "float32", "bucket_bytes": 1}, "dense": {"rampup_begin_step": 100}}


@case(momentum=(0.0, 0.9), sent=SENT)
def a_frozen_layer_does_not_move_by_a_bit(momentum, sent):
    model = Branches()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=0.01)
    assert_frozen(model, *wrap(model, plain, sparsity=0.9, min_numel=64, **SENT[sent]))


@case(algorithm=("onebit", "qsgd", "strom", "adacomp"))
def nor_does_it_with_other_compressors(algorithm):
    model = Branches()
    compression = close_later(getattr(dgc.Compression, algorithm)(min_numel=64))
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = dgc.DistributedOptimizer(plain, model.named_parameters(), compression=compression)
    assert_frozen(model, optimizer, compression)


@case
def dgc_momentum_equals_dense_before_the_rampup():
    model = make_model()
    optimizer = dgc.DGCMomentum(model.named_parameters(), 0.1, 0.9, 100, use_nesterov=True)
    train(optimizer, model, 20)
    assert_close(model, dense(20, decay=0.0))


@case
def models_are_broadcast_or_refused():
    model = make_model(seed=dist.get_rank())
    optimizer, _ = wrap(model)
    on_every_rank(dgc.ConfigError, r"dgc\.torch\.broadcast_parameters", lambda: train(optimizer, model, 1))
    model = make_model(seed=dist.get_rank())
    optimizer, _ = wrap(model)
    dgc.broadcast_parameters(model.state_dict())
    train(optimizer, model, 2)
    assert_identical(model)


@case
def a_pattern_that_fits_no_name_is_told_once():
    model = make_model()
    model[2].requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            _, compression = wrap(model, exclude=["2.*", "nowhere.*"], include="*.bias")  # a frozen layer fits
            compression.close()
    told = [str(w.message) for w in caught if "fits" in str(w.message)]
    wanted = "no parameter fits exclude='nowhere.*'; names are 0.weight, 0.bias, 2.weight, 2.bias, ..."
    assert told == [wanted] * (dist.get_rank() == 0), told


@case
def groups_of_ranks():
    both, alone = dist.new_group([0, 1]), dist.new_group([0])
    model = make_model()
    optimizer, compression = wrap(model, group=both, **EXACT)
    train(optimizer, model, 3)
    assert_close(model, dense(3))
    compression.close()
    if dist.get_rank() == 0:  # one rank has more groups than the other; then one group's name would be free again
        dist.new_group([0], use_local_synchronization=True)
    for _ in range(2):
        optimizer, compression = wrap(make_model(), group=both)
        compression.close()
    model = make_model()
    optimizer, compression = wrap(model, group=alone)
    train(optimizer, model, 3)  # each rank by itself: rank 0 is alone in the group, rank 1 outside
    assert compression.engine is None
    assert len(set(gathered(digest(model)))) == 2
    if dist.get_rank() == 1:  # PyTorch 2.15 counts such a group, and the next new_group() needs equal counts
        dist.new_group([1], use_local_synchronization=True)


@case(average=("dgc", "dense", "ddp"))
def a_sharded_optimizer_is_refused_where_others_average_its_gradients(average):
    both, alone = dist.new_group([0, 1]), [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    for over, group, right in ((None, alone, False), (None, both, True), (alone, None, True)):
        model = make_model()
        zero = dgc.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, group=over)
        trained = DistributedDataParallel(model, process_group=group) if average == "ddp" else model
        if average == "dgc":
            wrap(model, zero, group=group)
        elif average == "dense":
            dgc.DistributedOptimizer(zero, model.named_parameters(), group=group)
        loss_of(trained, 0).backward()
        if right:
            zero.step()
            assert_identical(model)
        else:
            on_every_rank(dgc.ConfigError, "give both the same process group", zero.step)


@case
def a_rank_waits_as_long_as_the_process_group_says():
    pair = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
    transport = DistributedTransport(pair)
    if dist.get_rank() == 0:
        start = time.monotonic()
        raises(dgc.TransportError, "failed", lambda: transport.allreduce(np.ones(1, np.float32)))
        assert time.monotonic() - start < 60
    dist.barrier()
    transport.close()


@case
def arguments_that_are_wrong_on_one_rank_alone():
    """Of DDP's hook and of our own classes; those of ``DistributedOptimizer`` are in ``wrong_arguments_cases.py``."""

    def registered(wrong):
        model = DistributedDataParallel(make_model())
        given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "compression": dgc.Compression.dgc()}
        dgc.ddp.register(**{"model": model, **given, **(wrong if dist.get_rank() == 1 else {})})

    unnamed = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
    for match, wrong in {
        "give a torch.optim.Optimizer": {"optimizer": 3},
        "were not named": {"optimizer": unnamed},
        "compression is 'topk'": {"compression": "topk"},
        "DDP's hook takes a compressor": {"compression": dgc.Compression.none},
    }.items():
        on_every_rank(dgc.ConfigError, match, lambda: registered(wrong))  # noqa: B023
    registered({})

    def built(make, right, wrong, **options):
        given = {"params": list(make_model().parameters()), **right}
        make(**{**given, **(wrong if dist.get_rank() == 1 else {})}, **options)

    paddle = {"learning_rate": 0.1, "momentum": 0.9, "rampup_begin_step": 0}
    errors = TypeError, dgc.DGCError
    on_every_rank(errors, "not iterable", lambda: built(dgc.DGCMomentum, paddle, {"params": None}))
    on_every_rank(
        errors,
        "group is a int",
        lambda: built(dgc.ZeroRedundancyOptimizer, {"group": None}, {"group": 3}, optimizer_class=torch.optim.Adam),
    )


@case(view=(False, True), passes=(1, 2), later=(False, True))
def a_model_in_ddp_is_named_before_anything_is_applied(view, passes, later):
    """In its forward pass; where DDP was built after the optimizer, at the latest in the first step."""
    text = r"trained in DistributedDataParallel.*dgc\.ddp\.register\(model, optimizer, compression\)"
    model = module = make_model()
    before = digest(module)
    for is_ddp in (not later, later):
        if is_ddp:
            model = DistributedDataParallel(module, gradient_as_bucket_view=view)
        else:
            optimizer, compression = wrap(model, sparsity=0.9, passes=passes)
    on_every_rank(dgc.ConfigError, text, lambda: train(optimizer, model, 1, passes=passes))
    assert compression.stats.steps == 0 or later
    assert digest(module) == before


@case
def a_model_beside_ddp_is_trained():
    """What was trained in DDP, and is still there, is trained without it now."""
    module = make_model()
    model = DistributedDataParallel(module)
    train(torch.optim.SGD(model.parameters(), **SGD), model, 2)
    optimizer, _ = wrap(module, sparsity=0.9)
    train(optimizer, module, 2, start=2)
    assert_identical(module)


@case
def two_models_in_turn():
    """A generator's loss passes through the discriminator, whose gradients are not its own."""

    def train_both(inputs):
        models = generator, discriminator = nn.Linear(20, 20), make_model(1)
        of_generator, of_discriminator = (wrap(m, **EXACT)[0] for m in models)
        for step in range(4):
            of_generator.zero_grad()
            loss = loss_of(nn.Sequential(generator, discriminator), step)
            loss.backward(inputs=list(generator.parameters()) if inputs else None)
            of_generator.step()
            of_discriminator.zero_grad()
            loss_of(discriminator, step).backward()
            of_discriminator.step()

    train_both(inputs=True)
    text = r"race condition\..*loss\.backward\(inputs=list\(generator\.parameters\(\)\)\)"
    on_every_rank(AssertionError, text, lambda: train_both(inputs=False))


@case(device=("cpu", "cuda"), unscales=(False, True))
def a_scaler_that_is_off_changes_nothing(device, unscales):
    """torch.amp's documented loops, in scripts for a GPU that run without one."""
    scaler = torch.amp.GradScaler(device, **({"enabled": False} if device == "cpu" else {}))
    assert not scaler.is_enabled()
    model = make_model()
    optimizer, _ = wrap(model, **EXACT, loss_scale=scaler)
    for step in range(10):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if unscales:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
    assert_close(model, dense(10))
