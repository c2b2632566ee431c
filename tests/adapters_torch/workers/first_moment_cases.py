"""On real ranks: Adam's first moment is the compressor's from the first selection on, and Adam's own before it."""

import copy
import warnings
from functools import partial

import horovod.torch as hvd
import torch
from adapters_torch.workers.tensors import through_file
from models import (
    assert_replicas_identical,
    broadcast,
    dense_backward,
    each_way,
    loss_of,
    make_model,
    quiet,
    train,
    worst_difference,
    wrap,
)
from torch import nn
from worker_tools import case, warned

import dgc.torch as dgc
from dgc.core.config import ADAPTIVE_FLOOR, STEPS_BEFORE, bias_correction

KIN = {
    "Adam": lambda p, **o: torch.optim.Adam(p, lr=3e-3, weight_decay=0.01, **o),
    "Adam amsgrad": lambda p, **o: torch.optim.Adam(p, lr=3e-3, amsgrad=True, **o),
    "AdamW": lambda p, **o: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1, **o),
    "AdamW fused": lambda p, **o: torch.optim.AdamW(p, lr=3e-3, fused=True, **o),
    "AdamW foreach": lambda p, **o: torch.optim.AdamW(p, lr=3e-3, foreach=True, **o),
    "AdamW maximize": lambda p, **o: torch.optim.AdamW(p, lr=1e-4, maximize=True, **o),
    "NAdam": lambda p, **o: torch.optim.NAdam(p, lr=3e-3, **o),
    "RAdam": lambda p, **o: torch.optim.RAdam(p, lr=3e-3, **o),
    "Adamax": lambda p, **o: torch.optim.Adamax(p, lr=3e-3, **o),
}
BETAS = (0.9, 0.99)
HALF = {"sparsity": 0.5, "momentum_masking": False, "min_numel": 16}


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, **{"lr": 3e-3, "betas": BETAS, **options})


def limited(mean, mean_of_squares):
    """A running mean of gradients, as far as the mean of their squares allows it."""
    limit = 0.1 / (0.01 * (1 - 0.81 / 0.99)) ** 0.5 * mean_of_squares.sqrt()
    return mean.clamp(-limit, limit)


def dense_train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        dense_backward(model, step)
        optimizer.step()


@case(name=KIN)
def before_the_selection_training_equals_dense(name):
    expected, make = make_model(), KIN[name]
    dense_train(expected, make(expected.parameters(), betas=BETAS), 20)
    for options in ({"sparsity": 0.0}, {"rampup_begin_step": 50, "error_feedback": "classic"}):
        for way, model, optimizer, compression in each_way(lambda m: make(m.parameters(), betas=BETAS), **options):
            train(optimizer, model, 20)
            assert worst_difference(model, expected) <= 1e-5, (way, options, worst_difference(model, expected))
            assert optimizer.param_groups[0]["betas"] == BETAS
            compression.close()


@case(way="ab", name=KIN)
def replicas_are_identical_while_entries_are_selected(way, name):
    model, seen = make_model(), []
    ramp = {"sparsity": [0.0, 0.9, 0.95], "rampup_step": 30, "error_feedback": "classic"}
    optimizer, compression = wrap(way, model, KIN[name](model.parameters()), **ramp)
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["betas"][0]))
    before = optimizer.param_groups[0]["betas"]
    train(optimizer, model, 40)
    assert_replicas_identical(model)
    assert optimizer.param_groups[0]["betas"] == before
    times = len(seen) // 40  # a step of Horovod's optimizer calls the user's
    assert seen == [before[0]] * 10 * times + [0.0] * 30 * times, seen
    assert 0.03 < compression.stats.last.density < 0.07
    assert torch.isfinite(loss_of(model, 0))


class Linear(nn.Module):
    """A loss that is linear in its parameters: gradients do not depend on them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(40, 20))
        self.bias = nn.Parameter(torch.randn(24))

    def loss(self, step, rank=None):
        generator = torch.Generator().manual_seed(1000 * step + (hvd.rank() if rank is None else rank))
        return sum((p * torch.randn(p.shape, generator=generator)).sum() for p in self.parameters())

    def mean_gradients(self, step):
        means = [torch.zeros_like(p) for p in self.parameters()]
        for rank in range(hvd.size()):
            gradients = torch.autograd.grad(self.loss(step, rank), list(self.parameters()))
            for mean, gradient in zip(means, gradients, strict=True):
                mean += gradient / hvd.size()
        return means


@case(way="ab", begin=(0, 4), kind=("stays", "falls", "pauses"))
def what_is_sent_and_what_is_left_is_the_closed_form_of_the_first_moment(way, begin, kind):
    """Whether entries are selected from the first step on or later, and whether beta1 stays, falls, or pauses at 0."""
    factor = 0.98 if kind == "falls" else 1.0
    model = Linear()
    options = {**HALF, "min_numel": 100, "small": "float32", "values": "float16", "rampup_begin_step": begin}
    optimizer, compression = wrap(way, model, adamw(model.parameters()), **options)
    sums = [torch.zeros_like(p) for p in model.parameters()]
    expected = [torch.zeros_like(p) for p in model.parameters()]
    moments = [torch.zeros_like(p) for p in model.parameters()]
    corrected = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(12):
        if kind == "pauses":
            optimizer.param_groups[0]["betas"] = (0.0 if 5 <= step < 8 else 0.9, 0.99)
        beta1 = optimizer.param_groups[0]["betas"][0]
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.synchronize()
        for i, mean in enumerate(model.mean_gradients(step)):
            moments[i] = beta1 * moments[i] + (1 - beta1) * mean
            if step < begin:
                # Adam corrects by the beta1 of the step, in which the moment is taken over here.
                corrected[i] = moments[i] / bias_correction(beta1 * factor, step + 1)
                continue
            left = beta1 ** (step + 1 + STEPS_BEFORE)
            corrected[i] = (corrected[i] * (beta1 - left) + mean * (1 - beta1)) / (1 - left)
            sums[i] += list(model.parameters())[i].grad
            expected[i] += corrected[i]
        with optimizer.skip_synchronize():
            optimizer.step()
        assert optimizer.param_groups[0]["betas"][0] == beta1
        optimizer.param_groups[0]["betas"] = (beta1 * factor, 0.99)
    residual = hvd.allreduce(compression.state_dict(own=True)["parameters"]["weight"]["v"])
    torch.testing.assert_close(sums[0] + residual.view(40, 20), expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums[1], expected[1], rtol=1e-4, atol=1e-4)
    if kind == "stays":
        torch.testing.assert_close(corrected[1], moments[1] / bias_correction(0.9, 12), rtol=1e-4, atol=1e-5)


@case(way="ab")
def a_group_without_selected_tensors_keeps_its_own_moment_and_groups_may_differ(way):
    def groups(m):
        return [{"params": [m.weight], "betas": (0.8, 0.9)}, {"params": [m.bias], "betas": (0.95, 0.99)}]

    model, dense = Linear(), Linear()
    optimizer, compression = wrap(way, model, adamw(groups(model)), **{**HALF, "min_numel": 100, "small": "float32"})
    reference = adamw(groups(dense))
    for step in range(10):
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.step()
        for p, mean in zip(dense.parameters(), dense.mean_gradients(step), strict=True):
            p.grad = mean
        reference.step()
    torch.testing.assert_close(model.bias, dense.bias, rtol=1e-6, atol=1e-6)
    assert (model.weight - dense.weight).abs().max() > 1e-3
    assert [group["betas"] for group in optimizer.param_groups] == [(0.8, 0.9), (0.95, 0.99)]
    assert compression.engine.adoption.hyper.momentum[1] == 0


@case(way="ab", saved_at=(3, 5, 8))
def a_resumed_run_goes_on_bit_for_bit(way, saved_at):
    """Saved before the first selection, right at it, and after it."""
    options = {**HALF, "rampup_begin_step": 5}
    model = make_model()
    optimizer, compression = wrap(way, model, adamw(model.parameters()), **options)
    train(optimizer, model, saved_at)
    compression.average(optimizer)
    saved = copy.deepcopy([each.state_dict() for each in (model, optimizer, compression)])
    train(optimizer, model, 8, start=saved_at)
    again = make_model(seed=1)
    resumed, other = wrap(way, again, adamw(again.parameters()), **options)
    for each, state in zip((again, resumed, other), saved, strict=True):
        each.load_state_dict(state)
    train(resumed, again, 8, start=saved_at)
    assert worst_difference(again, model) == 0


@case
def going_back_to_an_early_step_corrects_its_bias_again():
    for way, model, optimizer, compression in each_way(lambda m: adamw(m.parameters(), betas=(0.5, 0.99)), **HALF):
        train(optimizer, model, 3)
        compression.average(optimizer)
        parts = model, optimizer, compression
        saved = copy.deepcopy([each.state_dict() for each in parts])
        train(optimizer, model, 5, start=3)
        expected = copy.deepcopy(model)
        train(optimizer, model, 40, start=8)
        for each, state in zip(parts, saved, strict=True):
            each.load_state_dict(state)
        train(optimizer, model, 5, start=3)
        assert worst_difference(model, expected) == 0, way


@case
def an_early_state_of_one_rank_is_broadcast():
    model = make_model()
    optimizer, _ = wrap("b", model, adamw(model.parameters(), betas=(0.5, 0.99)), **HALF)
    train(optimizer, model, 3)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(optimizer, model, 40, start=3)
    if hvd.rank() == 0:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    quiet(broadcast, model, optimizer)
    quiet(train, optimizer, model, 5, start=3)
    assert int(optimizer.state[model.first.weight]["step"]) == 8
    assert_replicas_identical(model, "broadcast")


@case
def a_dense_run_and_a_compressed_one_take_each_others_checkpoints():
    dense = make_model()
    trained = adamw(dense.parameters())
    dense_train(dense, trained, 6)
    for way in "ab":
        model = copy.deepcopy(dense)
        optimizer, compression = wrap(way, model, adamw(model.parameters()), **HALF)
        optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
        one_step = partial(train, optimizer, model, 1, start=6)
        assert not warned(one_step, "none into the compressor")
        assert_replicas_identical(model, f"dense to {way}")
        # u went on from the dense run's moment: what was saved says so, in exp_avg and at its step.
        saved = optimizer.state_dict()
        trainable = {i: p for i, p in enumerate(dense.parameters()) if p.requires_grad}
        gradients = torch.autograd.grad(loss_of(dense, 6), list(trainable.values()))
        for i, gradient in zip(trainable, gradients, strict=True):
            before = trained.state_dict()["state"][i]["exp_avg"]
            if before.numel() < HALF["min_numel"] or before.ndim < 2:
                continue  # the mean of all ranks
            expected = limited(0.9 * before + 0.1 * gradient, saved["state"][i]["exp_avg_sq"])
            torch.testing.assert_close(saved["state"][i]["exp_avg"], expected, rtol=1e-3, atol=1e-6)
        plain = copy.deepcopy(model)
        back = adamw(plain.parameters())
        back.load_state_dict(through_file(saved))
        dense_train(plain, back, 3, start=7)
        assert torch.isfinite(loss_of(plain, 0))
        compression.close()


@case
def a_dense_run_moves_no_entry_far_that_the_compressed_one_never_sent():
    """Its mean of squares is 0, and the mean of this rank's own gradients is not."""
    for name, make in KIN.items():
        model = make_model()
        optimizer, compression = wrap("b", model, make(model.parameters(), betas=BETAS), sparsity=0.95)
        train(optimizer, model, 20)
        dense = copy.deepcopy(model)
        again = make(dense.parameters(), betas=BETAS)
        again.load_state_dict(through_file(optimizer.state_dict()))
        dense_train(dense, again, 1, start=20)
        moved = max((a - b).abs().max().item() for a, b in zip(model.parameters(), dense.parameters(), strict=True))
        assert moved < 4 * again.param_groups[0]["lr"], (name, moved)
        compression.close()


@case
def momentum_0_leaves_the_moment_in_the_optimizer():
    for way, model, optimizer, compression in each_way(lambda m: adamw(m.parameters()), **HALF, momentum=0.0):
        seen = []
        optimizer.register_step_pre_hook(lambda o, *_, seen=seen: seen.append(o.param_groups[0]["betas"]))
        train(optimizer, model, 3)
        assert not any(compression.engine.adoption.hyper.momentum), way
        assert set(seen) == {BETAS}


@case
def with_steps_the_second_moment_gets_a_longer_memory_after_30_percent_of_them():
    for own, later in ((0.95, 0.99), (0.999, 0.999)):
        model, seen = make_model(), []
        options = {"steps": 20, "error_feedback": "classic"}
        optimizer, _ = wrap("b", model, adamw(model.parameters(), betas=(0.9, own)), **options)
        optimizer.register_step_pre_hook(lambda o, *_, seen=seen: seen.append(o.param_groups[0]["betas"]))
        train(optimizer, model, 10)
        assert seen == [(0.0, own)] * 6 + [(0.0, later)] * 4
        assert optimizer.param_groups[0]["betas"] == (0.9, own)


@case
def a_step_of_the_users_own_keeps_the_moment_and_says_so():
    class Own(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    model = make_model()
    optimizer = Own(model.parameters())
    assert warned(lambda: wrap("b", model, optimizer, **HALF), "its first moment stays in it") == 1
    train(optimizer, model, 3)
    assert not any(optimizer.compression.engine.adoption.hyper.momentum)


@case
def a_first_moment_behind_the_compressors_momentum_is_told():
    for kind, told in ((torch.optim.AdamW, True), (torch.optim.Adam, True), (torch.optim.RMSprop, False)):
        for momentum in (0.9, 0.0, None):
            model = make_model()
            wrapping = partial(wrap, "b", model, kind(model.parameters(), lr=0.01), momentum=momentum)
            said = warned(wrapping, "smooths what comes out of it once more.*leave momentum out")
            assert said == (told and momentum == 0.9), (kind, momentum)
    model = make_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer, _ = wrap("b", model, adamw(model.parameters(), betas=(0.0, 0.99)), momentum=0.9, sparsity=0.9)
        train(optimizer, model, 4)


class Lion(torch.optim.Optimizer):
    """Moves entries by the sign of a running mean."""

    def __init__(self, parameters, lr=1e-3):  # Horovod gives groups, and no options
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})


@case(way="ab")
def few_entries_before_an_adaptive_optimizer_are_told_with_the_remedy(way):
    for make, options, told in (
        (torch.optim.AdamW, {}, 0),
        (torch.optim.AdamW, {"error_feedback": "classic"}, 1),
        (Lion, {"sparsity": 0.999}, 1),
        (torch.optim.RMSprop, {"sparsity": 0.999}, 1),
        (torch.optim.AdamW, {"steps": 100_000, "error_feedback": "classic"}, 0),
        (torch.optim.AdamW, {"sparsity": 0.95}, 0),
        (torch.optim.SGD, {}, 0),
    ):
        model = make_model()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            _, compression = wrap(way, model, make(model.parameters(), lr=1e-3), **options)
        said = [str(w.message) for w in seen if "it learns less" in str(w.message)]
        assert len(said) == (told if hvd.rank() == 0 else 0), (make, options)
        reason = f"{make.__name__} does not move an entry in proportion to its gradient"
        assert all(reason in text and "steps=N" in text for text in said)
        if "steps" in options:
            assert compression.config.sparsity[-1] == 1 - ADAPTIVE_FLOOR


@case
def accumulation_and_a_skipped_step_change_nothing_for_the_moment():
    """A non-finite gradient is refused by the compressor and skipped by the scaler; Adam's own count does not rise."""
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer, compression = wrap(
        "b", model, adamw(model.parameters()), **HALF, loss_scale=scaler, hvd_options={"backward_passes_per_step": 2}
    )
    for step in range(6):
        optimizer.zero_grad()
        for part in range(2):
            loss = loss_of(model, 2 * step + part) * (float("inf") if step == 2 and hvd.rank() == 0 else 1.0)
            scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    assert int(optimizer.state[model.first.weight]["step"]) == 5
    assert compression.stats.refused_steps == 1
    assert torch.isfinite(loss_of(model, 0))
    assert_replicas_identical(model, "scaled")


@case(begin=(0, 4))
def sharded_updates_take_the_moment_too(begin):
    model = make_model()
    zero = dgc.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3, betas=BETAS)
    optimizer, compression = wrap("b", model, zero, **HALF, rampup_begin_step=begin)
    train(optimizer, model, 10)
    assert_replicas_identical(model)
    assert max(compression.engine.adoption.hyper.momentum) > 0.7
    assert optimizer.param_groups[0]["betas"] == BETAS
    optimizer.consolidate_state_dict()
    if hvd.rank() == 0:
        saved, u = optimizer.state_dict()["state"], compression.state_dict(own=True)["parameters"]
        for i, (name, p) in enumerate(model.named_parameters()):
            if "v" in u.get(name, {}):
                expected = limited(u[name]["u"].view_as(p) * bias_correction(0.9, 10), saved[i]["exp_avg_sq"])
                torch.testing.assert_close(saved[i]["exp_avg"], expected, rtol=1e-5, atol=1e-8)
