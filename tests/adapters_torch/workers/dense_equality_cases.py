"""On real ranks: where everything is sent, or nothing is compressed yet, training equals dense SGD."""

import itertools

import horovod.torch as hvd
import torch
from models import (
    EXACT,
    OPTIMIZERS,
    assert_replicas_identical,
    dense_reference,
    make_model,
    sgd,
    train,
    worst_difference,
    wrap,
)
from worker_tools import case

KINDS = {"before the rampup": (1e-6, {"rampup_begin_step": 1000}), "sparsity 0": (1e-5, EXACT)}


@case(way="ab", kind=KINDS)
def training_equals_dense_sgd(way, kind):
    bound, options = KINDS[kind]
    for own in OPTIMIZERS.values():
        model = make_model()
        expected = dense_reference(model, 20, **own)
        buckets = {"bucket_bytes": 8192} if way == "b" else {}
        optimizer, compression = wrap(way, model, sgd(model, **own), **options, **buckets)
        train(optimizer, model, 20)
        assert worst_difference(model, expected) <= bound, (own, worst_difference(model, expected))
        assert optimizer.param_groups[0]["momentum"] == own["momentum"]
        assert not optimizer.state, "momentum is the compressor's"
        assert_replicas_identical(model)
        compression.close()


@case(way="ab", begin=(0, 4))
def op_sum_equals_sgd_on_summed_gradients(way, begin):
    model = make_model()
    own = dict(lr=0.05, momentum=0.9, weight_decay=0.01)
    expected = dense_reference(model, 10, op="sum", **own)
    options = {**EXACT, "rampup_begin_step": begin, **({"op": hvd.Sum} if way == "a" else {})}
    optimizer, _ = wrap(way, model, sgd(model, **own), hvd_options={"op": hvd.Sum}, **options)
    train(optimizer, model, 10)
    assert worst_difference(model, expected) <= 1e-5


@case(way="ab")
def parameter_groups_keep_their_own_momentum_and_decay(way):
    def make(m):
        groups = [
            {"params": [*m.first.parameters(), *m.left.parameters()], "momentum": 0.5, "weight_decay": 0.05},
            {"params": [*m.right.parameters(), *m.last.parameters()], "momentum": 0.9, "nesterov": True},
        ]
        return torch.optim.SGD(groups, lr=0.1)

    model = make_model()
    expected = dense_reference(model, 8, make=make)
    optimizer, _ = wrap(way, model, make(model), **EXACT)
    train(optimizer, model, 8)
    assert worst_difference(model, expected) <= 1e-5


@case(way="ab")
def the_compressors_momentum_takes_the_optimizers_decay_along(way):
    model = make_model()
    expected = dense_reference(model, 10, momentum=0.9, weight_decay=0.05)
    optimizer, _ = wrap(way, model, sgd(model, momentum=0.0, weight_decay=0.05), momentum=0.9, **EXACT)
    train(optimizer, model, 10)
    assert worst_difference(model, expected) <= 1e-5


@case(groups=(2, None))
def horovods_groups_of_gradients_change_nothing(groups):
    model = make_model()
    expected = dense_reference(model, 6, momentum=0.9)
    optimizer, _ = wrap("a", model, sgd(model), **EXACT, hvd_options={"groups": groups})
    train(optimizer, model, 6)
    assert worst_difference(model, expected) <= 1e-5


@case(way="ab")
def two_models_that_train_each_other(way):
    """As in a GAN, whose models are frozen in turn."""

    def gan(distribute):
        torch.manual_seed(5)
        maker = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 20))
        judge = torch.nn.Linear(20, 10)
        optimizers = distribute(maker), distribute(judge)
        for step, (model, optimizer) in itertools.product(range(4), zip((judge, maker), optimizers[::-1], strict=True)):
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))  # the same on all ranks
            optimizer.zero_grad()
            fake = maker(x) if model is maker else maker(x).detach()
            judge.requires_grad_(model is judge)
            ((1 if model is judge else -1) * judge(fake).square().mean()).backward()
            optimizer.step()
        return torch.nn.ModuleList([maker, judge])

    assert worst_difference(gan(lambda m: wrap(way, m, sgd(m), **EXACT)[0]), gan(sgd)) <= 1e-5
