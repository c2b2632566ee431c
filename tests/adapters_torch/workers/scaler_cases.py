"""On 2 real ranks: loss scaling, and gradients that are not finite."""

import warnings

import horovod.torch as hvd
import torch
from models import EXACT, assert_replicas_identical, flat, loss_of, make_model, on_every_rank, quiet, sgd, train, wrap
from worker_tools import case, warned

from dgc.errors import LayoutError


def scaled_step(optimizer, model, scaler, step, factor=1.0):
    optimizer.zero_grad()
    scaler.scale(loss_of(model, step) * factor).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()


@case(way="ab")
def an_overflow_on_one_rank_is_skipped_on_all_and_training_goes_on(way):
    """Nothing that was sent in that step counts."""
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    optimizer, compression = wrap(way, model, sgd(model), sparsity=0.9, loss_scale=scaler)
    skipped = []
    for step in range(12):
        before, scale = [p.detach().clone() for p in model.parameters()], scaler.get_scale()
        scaled_step(optimizer, model, scaler, step, float("inf") if step == 5 and hvd.rank() == 1 else 1.0)
        if scaler.get_scale() < scale:
            skipped.append(step)
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert skipped == [5], skipped
    assert compression.stats.refused_steps == 1
    assert compression.engine.exchange.state.step == 11
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert_replicas_identical(model)


@case(way="ab")
def an_overflow_of_a_float16_model_refuses_the_step_on_all_ranks(way):
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 60).half()
    optimizer, _ = wrap(way, model, sgd(model, lr=0.05), sparsity=0.9, loss_scale=lambda: 1024.0)
    refused = []
    for step in range(6):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + hvd.rank())
        loss = model(torch.randn(8, 40, generator=generator).half()).square().mean()
        (loss * 1024.0 * (1e6 if step == 2 and hvd.rank() == 0 else 1)).backward()
        optimizer.synchronize()
        finite = all(torch.isfinite(p.grad).all() for p in model.parameters())
        refused.append(not finite)
        if finite:
            for p in model.parameters():
                p.grad.div_(1024.0)
            with optimizer.skip_synchronize():
                optimizer.step()
    assert refused == [False, False, True, False, False, False], refused
    assert_replicas_identical(model)


@case(way="ab")
def a_refused_step_that_the_script_leaves_out_changes_nothing(way):
    model = make_model()
    optimizer, compression = wrap(way, model, sgd(model), **EXACT)
    train(optimizer, model, 2)
    optimizer.zero_grad()
    (loss_of(model, 2) * (float("nan") if hvd.rank() else 1)).backward()
    optimizer.synchronize()
    assert compression.stats.refused_steps == 1
    before = compression.residual_norm
    optimizer.zero_grad()
    assert compression.residual_norm == before
    train(optimizer, model, 2)
    assert_replicas_identical(model)


@case(way="ab")
def a_gradient_that_is_not_finite_is_told_with_rank_parameter_and_step(way):
    model = make_model()
    optimizer, _ = wrap(way, model, sgd(model), sparsity=0.9)
    train(optimizer, model, 2)
    hook = model.left.weight.register_hook(lambda grad: grad * (float("nan") if hvd.rank() == 1 else 1.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(optimizer, model, 2, start=2)
    hook.remove()
    texts = [str(w.message) for w in caught if "the step is refused" in str(w.message)]
    # Other ranks than 0 and 1 are told in the next step, in which all parameters are NaN: by their own gradients.
    told = [text for text in texts if "in step 2, met by rank 1" in text]
    assert len(texts) == 1, texts
    assert len(told) == (1 if hvd.rank() < 2 else 0), texts
    assert hvd.rank() != 1 or "'left.weight'" in told[0]


@case(way="ab", kind=("unknown", "known", "disabled"))
def a_scaler_that_the_compressor_does_not_know_is_told_once(way, kind):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=kind != "disabled")
    model = make_model()
    options = {"loss_scale": scaler} if kind == "known" else {}
    optimizer, _ = wrap(way, model, sgd(model), sparsity=0.9, **options)

    def training():
        for step in range(3):
            scaled_step(optimizer, model, scaler, step)

    assert warned(training, "GradScaler.*loss_scale=scaler") == (kind == "unknown")


@case(known=("as a function", "as a number", "not at all"))
def a_scaler_that_divides_gradients_during_their_exchange_is_noticed(known):
    """A scaler does so in its step(), unless the script has called synchronize()."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    options = {"as a function": {"loss_scale": lambda: scaler.get_scale()}, "as a number": {"loss_scale": 1024.0}}
    model = make_model()
    optimizer, _ = wrap("b", model, sgd(model), sparsity=0.9, **options.get(known, {}))
    if known == "not at all":
        train(optimizer, model, 1)
        optimizer.zero_grad()
    before = flat(model).clone()
    scaler.scale(loss_of(model, 1)).backward()
    on_every_rank(LayoutError, "was changed or replaced while it was exchanged", lambda: scaler.step(optimizer))
    assert torch.equal(flat(model), before)


@case
def a_script_may_stop_scaling():
    """Of a scaler that steps no more the gradients are not divided."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model), sparsity=0.9)
    quiet(scaled_step, optimizer, model, scaler, 0)
    train(optimizer, model, 2, start=1)
    assert compression.describe()["step"] == 3
    assert_replicas_identical(model)
