"""Every compressor in both ways of use: it learns, replicas stay identical, and a resumed run continues bit for bit."""

import horovod.torch as hvd
import torch
from adapters_torch.workers.tensors import through_file
from documented import documented_compressor, own_names
from models import assert_replicas_identical, flat, loss_of, make_model, raises, sgd, train
from worker_tools import case

import dgc.torch as dgc

OPTIONS = {
    "dgc": {"sparsity": 0.9},
    "topk": {"sparsity": 0.9},
    "strom": {"threshold": 0.02, "max_density": 0.1},
}
STEPS = 12


def wrapped(name, way, model, optimizer, **options):
    options = {"min_numel": 64, **OPTIONS.get(name, {}), **options}
    make = getattr(dgc.Compression, name)
    if way == "a":
        compression = make(model.named_parameters(), optimizer=optimizer, **options)
        return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression), compression
    compression = make(**options)
    return dgc.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression), compression


def losses(model):
    """Of the first batches of all ranks, the same everywhere."""
    with torch.no_grad():
        own = sum(loss_of(model, step) for step in range(4))
    return hvd.allreduce(own, name="losses").item()


def run(name, way, steps=STEPS):
    model = make_model(width=32)
    optimizer, compression = wrapped(name, way, model, sgd(model, momentum=0.5))
    before = losses(model)
    train(optimizer, model, steps)
    return model, optimizer, compression, before


def check(name):
    finals = []
    for way in "ab":
        model, optimizer, compression, before = run(name, way)
        assert_replicas_identical(model, f"{name} {way}")
        assert losses(model) < before, f"{name}, way {way}: the loss did not fall"
        stats = compression.stats
        assert stats.steps == STEPS
        assert stats.last.bytes_sent < stats.last.dense_bytes
        adopted = 0.5 if name == "dgc" else 0.0
        assert max(compression.engine.adoption.hyper.momentum) == adopted, "only dgc adopts momentum unless asked"
        finals.append(flat(model))
        saved = compression.state_dict(own=True)
        assert set(saved["parameters"]) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert torch.equal(*finals), f"{name}: the ways differ"
    # Again, with a checkpoint in the middle.
    model, optimizer, compression, _ = run(name, "b", steps=STEPS // 2)
    compression.average(optimizer)
    saved = through_file([each.state_dict() for each in (model, optimizer, compression)])
    second = make_model(width=32)
    continued, fresh = wrapped(name, "b", second, sgd(second, momentum=0.5))
    for each, state in zip((second, continued, fresh), saved, strict=True):
        each.load_state_dict(state)
    for each, net in ((optimizer, model), (continued, second)):
        train(each, net, STEPS - STEPS // 2, start=STEPS // 2)
    assert torch.equal(flat(second), flat(model)), f"{name}: the resumed run differs"


for _name in own_names():

    def _one(name=_name):
        check(name)

    _one.__name__ = _name
    case(_one)


@case
def the_documented_compressor_of_ones_own():
    check(documented_compressor()[1])


@case
def momentum_is_adopted_when_asked():
    model = make_model(width=32)
    optimizer, compression = wrapped("strom", "b", model, sgd(model, momentum=0.5, weight_decay=0.01), momentum=None)
    assert set(compression.engine.adoption.hyper.momentum) == {0.5}
    assert set(compression.engine.adoption.hyper.weight_decay) == {0.01}
    train(optimizer, model, 3)
    assert_replicas_identical(model, "adopted")
    model = make_model(width=32)
    raises(dgc.ConfigError, "applied twice", lambda: wrapped("topk", "a", model, sgd(model), momentum=0.9))


@case
def the_documentation_of_a_compressor_is_that_of_its_constructor():
    assert "US 11,295,208" in dgc.Compression.adacomp.__doc__
