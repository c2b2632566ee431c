"""Seeing inside, on real ranks: training has the same bits, and a writer that fails harms nobody."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings

import horovod.torch as hvd
import torch
from models import assert_replicas_identical, flat, loss_of, make_model, raises, sgd, shared_folder, train, wrap
from scalar_writer import Writer
from worker_tools import case, run_cases

import dgc.torch as dgc

OPTIONS = dict(sparsity=[0.75, 0.9], rampup_step=6, rampup_begin_step=2)
HELD = {"first.weight", "left.weight", "right.weight"}
RAN = 8


def momentum_optimizer(model, **options):
    named = list(model.named_parameters())
    return dgc.DGCMomentum(named, learning_rate=0.05, momentum=0.9, rampup_begin_step=2, sparsity=[0.9], **options)


def run(way, writer=None, every=1, steps=RAN, **options):
    """A model trained, logged or not; returns (parameters, what was seen last)."""
    model = make_model()
    if way == "momentum":
        optimizer = compression = momentum_optimizer(model, min_numel=64)
    else:
        optimizer, compression = wrap(way, model, sgd(model), **{**OPTIONS, **options})
    if writer is not None:
        compression.log_to(writer, every=every)
    train(optimizer, model, steps)
    look = compression.inside
    assert_replicas_identical(model, "replicas")
    compression.close()
    return flat(model), look


@case
def training_has_the_same_bits():
    """Logged by all ranks, and by one."""
    for way in ("a", "b", "momentum"):
        expected, _ = run(way)
        for writes in ("everybody", "rank 0"):
            writer = Writer() if writes == "everybody" or hvd.rank() == 0 else None
            found, look = run(way, writer)
            assert torch.equal(found, expected), (way, writes)
            if writer is None:
                assert len(look) == 0
                assert "log_to" in look.nothing
                continue
            biases = {"first.bias", "left.bias", "right.bias", "last.weight"} if way == "momentum" else set()
            assert set(look) == HELD | biases, (way, look)
            assert writer.steps == list(range(2, RAN)), (way, writer.steps)  # two dense ones


@case
def figures_are_written_by_name():
    writer = Writer()
    _, look = run("b", writer, every=3)
    assert writer.steps == [3, 6]
    assert look.step == 6
    row = {tag: value for tag, value, step in writer.rows if step == 6}
    for name, figures in look.items():
        for figure, value in figures.as_dict().items():
            assert row.pop(f"compression.{figure}/{name}") == value
    for figure, value in look.total.as_dict().items():
        assert row.pop(f"compression.total/{figure}") == value
    assert not row
    assert 0.05 < look.total.density < 0.3
    assert 0 < look["left.weight"].sent_share < 1
    assert "sent dense" in look.left_out["first.bias"]
    assert "left.weight" in str(look)
    raises(KeyError, "sent dense", lambda: look["first.bias"])


@case
def dense_steps_and_compressors_without_a_residual_say_so():
    _, look = run("b", Writer(), steps=2)
    assert len(look) == 0
    assert look.step == 1
    assert "the step was dense" in look.nothing
    model = make_model()
    compression = dgc.Compression.qsgd()
    optimizer = dgc.DistributedOptimizer(sgd(model), model.named_parameters(), compression)
    writer = Writer()
    compression.log_to(writer, every=1)
    train(optimizer, model, 3)
    assert "qsgd keeps no residual" in compression.inside.nothing
    assert writer.rows == []
    compression.close()


@case
def it_is_turned_on_off_and_on_within_a_run():
    expected, _ = run("b", steps=9)
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model), **OPTIONS)
    first, second = Writer(), Writer()
    assert "log_to" in compression.inside.nothing
    train(optimizer, model, 3)
    compression.log_to(first, every=1)
    train(optimizer, model, 2, start=3)
    compression.log_to(None)
    assert compression.engine.exchange.probe is None
    assert compression.inside.step == 4
    train(optimizer, model, 2, start=5)
    assert compression.inside.step == 4
    compression.log_to(second, every=2, prefix="again")
    train(optimizer, model, 2, start=7)
    assert first.steps == [3, 4]
    assert second.steps == [8]
    assert all(tag.startswith("again.") for tag, _, _ in second.rows)
    compression.close()
    assert compression.inside.step == 8
    assert torch.equal(flat(model), expected)


@case
def several_passes_sparse_updates_and_none():
    """Steps are those of the exchange."""
    for options in (
        {"hvd_options": {"backward_passes_per_step": 2}},
        {"sparse_updates": True},
        {"sparse_updates": False},
    ):
        found = []
        for writer in (None, Writer()):
            model = make_model()
            optimizer, compression = wrap("b", model, sgd(model), **OPTIONS, **options)
            passes = 2 if "hvd_options" in options else 1
            if writer is not None:
                compression.log_to(writer, every=1)
            for step in range(6):
                optimizer.zero_grad()
                for part in range(passes):
                    loss_of(model, passes * step + part).backward()
                optimizer.step()
            found.append(flat(model))
        assert torch.equal(*found), options
        assert writer.steps == [2, 3, 4, 5]


@case
def a_writer_that_raises_is_turned_off_on_its_rank_alone():
    for way in ("a", "b", "momentum"):
        expected, _ = run(way)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            writer = Writer(fails_at=4)
            found, look = run(way, writer if hvd.rank() == 1 else None)
        assert torch.equal(found, expected), way
        told = [str(w.message) for w in caught if "turned off" in str(w.message)]
        assert len(told) == (hvd.rank() == 1), told
        if hvd.rank() == 1:
            assert "OSError: disk full" in told[0]
            assert writer.steps == [2, 3]
            assert writer.calls == len(writer.rows) + 1
            assert look.step == 4  # was seen, though not written


@case
def where_warnings_are_errors_the_step_is_whole():
    """The exception comes from ``step()``, after the update: who catches it goes on with the others."""
    for way in ("a", "b", "momentum"):
        expected, _ = run(way)
        model = make_model()
        if way == "momentum":
            optimizer = compression = momentum_optimizer(model, min_numel=64)
        else:
            optimizer, compression = wrap(way, model, sgd(model), **OPTIONS)
        if hvd.rank() == 1:
            compression.log_to(Writer(fails_at=3), every=1)
        raised = []
        for step in range(RAN):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)
                try:
                    optimizer.step()
                except RuntimeWarning as warning:
                    raised.append((step, str(warning)))
        assert [step for step, _ in raised] == [3] * (hvd.rank() == 1), (way, raised)
        assert torch.equal(flat(model), expected), way


@case
def who_never_calls_step_is_told_all_the_same():
    """By the next exchange, which it does not break."""
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model, momentum=0.0), sparsity=0.9)
    compression.log_to(Writer(fails_at=0), every=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        shown = []
        warnings.showwarning = lambda message, *rest: shown.append(str(message))
        for step in range(3):
            for p in model.parameters():
                p.grad = None
            loss_of(model, step).backward()
            optimizer.synchronize()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.05 * p.grad
    assert len([text for text in shown if "disk full" in text]) == 1, shown
    assert_replicas_identical(model, "by hand")


@case
def a_resumed_run_is_the_same_with_a_log():
    """Bits as without."""
    straight, _ = run("b", steps=10)
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model), **OPTIONS)
    compression.log_to(Writer(), every=1)
    train(optimizer, model, 6)
    folder = shared_folder("inside")
    dgc.save_checkpoint(folder, model=model, optimizer=optimizer, compression=compression)
    compression.close()
    resumed = make_model(seed=9)
    optimizer, compression = wrap("b", resumed, sgd(resumed), **OPTIONS)
    writer = Writer()
    compression.log_to(writer, every=1)
    train(optimizer, resumed, 1, start=40)
    dgc.load_checkpoint(folder, model=resumed, optimizer=optimizer, compression=compression)
    writer.rows.clear()
    train(optimizer, resumed, 4, start=6)
    assert torch.equal(flat(resumed), straight)
    assert writer.steps == [6, 7, 8, 9]
    compression.close()
    hvd.barrier()


@case
def two_optimizers_have_two_writers():
    models = [make_model(seed=s) for s in (0, 1)]
    pairs = [wrap("b", model, sgd(model), sparsity=0.9) for model in models]
    writers = [Writer(), Writer()]
    for (_, compression), writer, every in zip(pairs, writers, (1, 2), strict=True):
        compression.log_to(writer, every=every)
    for step in range(5):
        for model, (optimizer, _) in zip(models, pairs, strict=True):
            train(optimizer, model, 1, start=step)
    assert [writer.steps for writer in writers] == [[0, 1, 2, 3, 4], [0, 2, 4]]
    norms = [compression.inside.total.residual_norm for _, compression in pairs]
    assert norms[0] != norms[1]
    for _, compression in pairs:
        compression.close()


@case
def a_copy_has_no_log():
    compression = dgc.Compression.dgc(sparsity=0.9)
    compression.log_to(Writer(), every=1)
    assert "no model" in compression.inside.nothing
    for other in (copy.deepcopy(compression), pickle.loads(pickle.dumps(compression))):
        assert other.config == compression.config
        assert "log_to" in other.inside.nothing
    model = make_model()
    optimizer = dgc.DistributedOptimizer(sgd(model), model.named_parameters(), compression)
    train(optimizer, model, 2)
    assert compression.inside.step == 1
    # Bound, it holds a connection, with and without a log.
    for writer in (Writer(), None):
        compression.log_to(writer)
        for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
            raises(TypeError, "load_state_dict", functools.partial(attempt, compression))
    train(optimizer, model, 2, start=2)
    compression.close()


@case
def arguments_are_checked():
    compression = dgc.Compression.dgc()
    for wrong in (object(), "runs", 3):
        raises(dgc.ConfigError, "add_scalar", functools.partial(compression.log_to, wrong))
    for every in (0, -1, 1.5, True, "10", None):
        raises(dgc.ConfigError, "every is", functools.partial(compression.log_to, Writer(), every))
    compression.log_to(None, every=0)


@case
def a_step_that_is_refused_is_not_looked_at():
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model), sparsity=0.9)
    writer = Writer()
    compression.log_to(writer, every=1)
    train(optimizer, model, 2)
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        (loss_of(model, 7) * (float("nan") if hvd.rank() else 1.0)).backward()
        optimizer.synchronize()
    assert compression.stats.refused_steps == 1
    train(optimizer, model, 1, start=2)
    assert writer.steps == [0, 1, 2]


if __name__ == "__main__":
    run_cases()
