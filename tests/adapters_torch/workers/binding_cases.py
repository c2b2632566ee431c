"""What is done before a compressor knows its model, what remains when binding fails, and what binding refuses."""

from __future__ import annotations

import copy
import functools
import pickle

import horovod.torch as hvd
import torch
from models import flat, make_model, on_every_rank, raises, sgd, train, wrap
from worker_tools import case, run_cases

import dgc.torch as dgc


def state_after(steps):
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model), sparsity=0.9)
    train(optimizer, model, steps)
    state = compression.state_dict()
    compression.close()
    return state


@case
def a_state_loaded_before_binding_on_one_rank_only_is_refused_and_can_be_mended():
    state = state_after(2)
    model = make_model()
    compression = dgc.Compression.dgc(sparsity=0.9)
    if hvd.rank() == 1:
        compression.load_state_dict(state)

    def bind():
        return dgc.DistributedOptimizer(sgd(model), model.named_parameters(), compression=compression)

    on_every_rank(dgc.LayoutError, "on every rank or on none", bind)
    assert not compression.is_bound
    compression.load_state_dict(state)
    train(bind(), model, 1)
    assert compression.describe()["step"] == 3
    compression.close()


@case
def an_empty_state_resets():
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model), sparsity=0.9)
    empty = dgc.Compression.dgc().state_dict()
    for state in (empty, {}):
        train(optimizer, model, 2)
        assert compression.residual_norm > 0
        compression.load_state_dict(state)
        assert compression.residual_norm == 0
        assert compression.describe()["step"] == 0
    train(optimizer, model, 1)
    compression.load_state_dict([empty, empty, empty], resize=True)
    assert compression.residual_norm == 0
    text = "states differ" if hvd.size() > 1 else ""
    mine = compression.state_dict() if hvd.rank() else empty
    on_every_rank(dgc.LayoutError, text, lambda: compression.load_state_dict(mine))


@case
def a_binding_that_failed_leaves_nothing():
    compression = dgc.Compression.dgc(sparsity=0.9)
    wrong = make_model(width=64 + 8 * hvd.rank())

    def bind(model):
        return dgc.DistributedOptimizer(sgd(model), model.named_parameters(), compression=compression)

    for _ in range(2):
        on_every_rank(dgc.LayoutError, "parameters differ between ranks", lambda: bind(wrong))
        assert not compression.is_bound
        assert compression.engine is None
    model = make_model()
    train(bind(model), model, 2)
    assert compression.stats.steps == 2
    compression.close()


@case
def a_process_set_or_an_op_that_the_compressor_alone_was_given():
    alone = hvd.add_process_set([0])
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model), process_set=alone)
    assert compression.is_bound
    assert compression.engine is None
    assert optimizer.process_set is alone
    if hvd.rank() == 1:  # it cannot know which ranks wait, and waits for none
        named = {"process_set": hvd.global_process_set}
        raises(
            dgc.ConfigError,
            "different process sets",
            lambda: wrap("b", model, sgd(model), process_set=alone, hvd_options=named),
        )
    hvd.remove_process_set(alone)
    results = {}
    for op, factor in ((hvd.Average, 1), ("sum", hvd.size()), (hvd.Sum, hvd.size())):
        model = make_model()
        optimizer, compression = wrap("b", model, sgd(model, lr=0.1 / factor), op=op, rampup_begin_step=99)
        train(optimizer, model, 2)
        results[op] = model.last.weight.detach().clone()
    for found in results.values():
        torch.testing.assert_close(found, results[hvd.Average], rtol=1e-4, atol=1e-6)


@case
def arguments_of_the_wrapper():
    def refused(text, optimizer=None, **options):
        model = make_model()
        compression = dgc.Compression.dgc(**options.pop("compressor", {}))
        arguments = {"named_parameters": model.named_parameters(), "compression": compression, **options}
        chosen = sgd(model) if optimizer is None else optimizer
        on_every_rank(dgc.ConfigError, text, lambda: dgc.DistributedOptimizer(chosen, **arguments), text)

    for passes in (0, "2", True):
        refused("backward_passes_per_step", backward_passes_per_step=passes)
    for factor in (0.0, -1.0, "2"):
        refused("gradient_predivide_factor", gradient_predivide_factor=factor)
    refused("gradient_predivide_factor", gradient_predivide_factor=2.0, op=hvd.Sum)
    refused("torch.optim.Optimizer", optimizer=make_model())
    refused("pass it by its name", named_parameters=dgc.Compression.dgc(), compression=None)
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model))
    refused("distributed already", optimizer=optimizer)
    refused("distributed already", optimizer=optimizer, compression=None)
    assert optimizer.compression is compression


@case
def arguments_of_the_compressor():
    model = make_model()
    on_every_rank(dgc.ConfigError, "named_parameters", lambda: dgc.Compression.dgc(0.999))
    on_every_rank(dgc.ConfigError, "named_parameters", lambda: dgc.Compression.dgc(model.parameters(), sgd(model)))
    on_every_rank(dgc.ConfigError, "nothing to compress", lambda: dgc.Compression.dgc([], momentum=0.0))
    on_every_rank(dgc.ConfigError, "loss_scale", lambda: dgc.Compression.dgc(loss_scale="much"))


@case
def a_compressor_can_be_copied_until_it_is_bound():
    """As it is by a script that copies its settings, or hands them to a process that it spawns."""
    given = dgc.Compression.dgc(sparsity=0.9, exclude=["bias"])
    each = [given, copy.copy(given), copy.deepcopy(given), pickle.loads(pickle.dumps(given))]
    ends = []
    for compression in each:
        model = make_model()
        optimizer = dgc.DistributedOptimizer(sgd(model), model.named_parameters(), compression=compression)
        train(optimizer, model, 2)
        ends.append(flat(model))
        for copied in (copy.copy, lambda c: copy.deepcopy({"settings": c}), lambda c: pickle.dumps([c])):
            raises(TypeError, r"load_state_dict\(compression.state_dict", functools.partial(copied, compression))
    assert all(torch.equal(end, ends[0]) for end in ends)
    for compression in each:
        compression.close()


if __name__ == "__main__":
    run_cases()
