"""On 2 real ranks under torchrun: the optimizer steps on its rank's own gradient, and updates are exchanged."""

import contextlib
import copy
from unittest.mock import Mock, patch

import numpy as np
import torch
import torch.distributed as dist
from adapters_torch.torchrun_tools import (
    assert_close,
    assert_identical,
    dense,
    digest,
    gathered,
    loss_of,
    make_model,
    on_every_rank,
)
from adapters_torch.workers.ddp_tools import Run, adamw, sgd, train
from adapters_torch.workers.tensors import raises
from torch import nn
from torch.distributed.algorithms.join import Join
from worker_tools import case, close_later, warned

import dgc.torch as dgc

AHEAD = {"error_feedback": "step-ahead"}
EXACT = {**AHEAD, "sparsity": 0.0, "values": "float32", "small": "float32"}
SPARSE = {**AHEAD, "sparsity": 0.95}
FRONTS = {"dgc": None, "hook": None}
OPTIMIZERS = {
    "sgd": sgd,
    "adamw": adamw,
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-3),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=1e-3),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
}
DAMAGED = {
    "nan": [[float("nan")], [1.0]],
    "ragged": [[1.0], [1.0, 2.0]],
    "text": [["x"], ["y"]],
    "number": 5,
    "names": {"a": 1, "b": 2},
    "row": [1.0, 2.0],
}


def wrapped(make_optimizer, model, **options):
    compression = close_later(dgc.Compression.dgc(**options))
    return dgc.DistributedOptimizer(make_optimizer(model), model.named_parameters(), compression=compression)


def shared(run):
    return run.compression.engine.ahead.shared


def assert_shared(run):
    assert len(set(gathered(digest(shared(run))))) == 1


@case(front=FRONTS)
def sgd_at_sparsity_0_equals_training_on_the_mean_gradient(front):
    run = Run(front, sgd, **EXACT).train(range(20))
    assert_close(run.module, dense(20))
    assert_identical(run.module)


@case(front=FRONTS, late=(False, True), kind=OPTIMIZERS)
def shared_values_are_the_same_on_all_ranks_with_every_optimizer(front, late, kind):
    run = Run(front, OPTIMIZERS[kind], late=late, **SPARSE).train(range(8))
    assert all(torch.isfinite(theta).all() for theta in shared(run))
    run.compression.average()
    assert_identical(run.module)
    assert_shared(run)


@case
def the_optimizer_keeps_its_options_and_its_momentum():
    run = Run("dgc", sgd, **SPARSE)
    before = [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]
    run.train(range(3))
    assert before == [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]
    assert all("momentum_buffer" in state for state in run.optimizer.state.values())


@case
def with_adamw_updates_are_exchanged_unless_classic_options_are_given():
    chosen = {"steps": 10}
    for options, ahead in (
        (chosen, True),
        ({**chosen, "momentum": 0.0}, False),
        ({}, True),
        ({"sparsity": 0.0}, False),
    ):
        run = Run("dgc", adamw, **options).train(range(3))
        assert run.compression.config.steps_ahead == ahead
        run.compression.close()
    assert not Run("dgc", sgd, **chosen).train(range(3)).compression.config.steps_ahead
    assert Run("dgc", OPTIMIZERS["adafactor"], **chosen).train(range(3)).compression.config.steps_ahead


@case
def muon_beside_adamw_each_with_a_compressor_of_its_own():
    if not hasattr(torch.optim, "Muon"):  # before torch 2.9
        return
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
    dgc.broadcast_parameters(model.state_dict())
    optimizers = []
    for kind, dim in ((torch.optim.Muon, 2), (torch.optim.AdamW, 1)):
        named = [(name, p) for name, p in model.named_parameters() if p.dim() == dim]
        compression = close_later(dgc.Compression.dgc(steps=6, min_numel=64))
        own = kind([p for _, p in named], lr=0.01)
        optimizers.append(dgc.DistributedOptimizer(own, named, compression=compression))
        assert compression.config.steps_ahead
    losses = []
    for step in range(6):
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = model(inputs).square().mean()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    assert losses[-1] < losses[0]
    assert_identical(model)


@case
def the_average_at_the_end_counts_in_the_total_and_not_in_the_last_step():
    run = Run("dgc", adamw, steps=6)
    run.train(range(5))
    ratio, before = run.compression.stats.last.ratio, run.compression.stats.total.bytes_sent
    run.train(range(5, 6))
    assert ratio == run.compression.stats.last.ratio > 2
    sizes = sum(p.numel() for p in run.module.parameters())
    assert run.compression.stats.total.bytes_sent > before + 4 * sizes


@case(late=(False, True))
def a_reset_in_the_middle_begins_again_with_equal_ranks(late):
    run = Run("dgc", adamw, late=late, **SPARSE).train(range(4))
    run.compression.reset()
    assert_identical(run.module)
    run.train(range(4, 8))
    run.compression.average()
    assert_identical(run.module)


# -- habits ------------------------------------------------------------------------------------------------------------


def trained(front, habit, **options):
    """Train as a script does that has this habit; return the model."""
    run = Run(front, sgd, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 12)
    for step in range(12):
        if habit == "closure":
            run.optimizer.step(lambda step=step: run.backward(step))
            continue
        run.optimizer.zero_grad(set_to_none=habit != "zeros")
        if habit == "accumulation":
            loss_of(run.model, 100 + step).backward()
        loss_of(run.model, step).backward()
        if habit == "horovod" and front == "dgc":
            run.optimizer.synchronize()
            with run.optimizer.skip_synchronize():
                run.optimizer.step()
        else:
            run.optimizer.step()
        if habit == "scheduler":
            scheduler.step()
        if habit == "clamped":  # torch does not count a change of .data as a new version of the tensor
            for p in run.module.parameters():
                p.data.clamp_(-0.1, 0.1)
    return run.module


@case(habit=("zeros", "accumulation", "closure", "horovod", "scheduler", "clamped"))
def habits_equal_dense_training_at_sparsity_0(habit):
    model = trained("dgc", habit, **EXACT)
    assert_close(model, trained("dense", habit))
    assert_identical(model)


@case(front=FRONTS)
def gradients_are_those_of_the_own_rank(front):
    """What a script clips, logs or changes between backward() and step() is its own gradient."""
    run = Run(front, sgd, **SPARSE)
    run.backward(0)
    alone = make_model()
    loss_of(alone, 0).backward()
    for p, q in zip(run.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    nn.utils.clip_grad_norm_(run.module.parameters(), 0.01)
    run.optimizer.step()
    moved = sum(
        (p.detach() - q.detach()).square().sum()
        for p, q in zip(run.module.parameters(), alone.parameters(), strict=True)
    )
    assert 0 < float(moved) < 1
    assert_shared(run)


def overflow_on_rank_1(run, at=3):
    """Train with a GradScaler; only rank 1 skips a step, and lowers its scale. The script unscales every second one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)
    for step in range(6):
        run.optimizer.zero_grad()
        scaler.scale(loss_of(run.model, step)).backward()
        if step == at and dist.get_rank() == 1:
            next(run.module.parameters()).grad[0] = torch.inf
        if step % 2:
            scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= scale:  # as PyTorch's forum advises; only one rank leaves the scheduler out
            scheduler.step()
    assert gathered(scaler.get_scale()) == [2.0**10, 2.0**9]
    assert all(torch.isfinite(p).all() for p in run.module.parameters())
    assert_shared(run)
    run.compression.average(run.optimizer)
    assert_identical(run.module)
    assert_identical([run.optimizer.state[p]["step"] for p in run.module.parameters()])


@case(front=FRONTS, fused=(False, True), at=(2, 3))
def a_gradient_that_overflows_on_one_rank_is_skipped_there(front, fused, at):
    """The other rank's update is applied on both, and no rank waits."""
    overflow_on_rank_1(Run(front, lambda model: adamw(model, fused=fused), **SPARSE), at)


@case(front=FRONTS)
def a_new_optimizer_of_the_same_parameters_goes_on(front):
    """As for fine-tuning: also with a GradScaler and an overflow on one rank."""
    run = Run(front, adamw, **SPARSE).train(range(3))
    run.optimizer = torch.optim.AdamW(run.module.parameters(), lr=1e-4)
    overflow_on_rank_1(run)
    run.optimizer = sgd(run.module)
    run.train(range(9, 12))
    assert_shared(run)


@case(front=FRONTS)
def an_adaptive_optimizer_after_sgd_is_refused(front):
    run = Run(front, sgd, **SPARSE).train(range(3))
    run.optimizer = adamw(run.module)
    run.backward(9)
    on_every_rank(dgc.ConfigError, "built for an SGD", run.optimizer.step)
    run.compression.reset()
    run.compression.close()
    close_later(compression := dgc.Compression.dgc(**SPARSE))
    dgc.DistributedOptimizer(run.optimizer, run.module.named_parameters(), compression=compression)
    if front == "dgc":
        run.backward(10)
        run.optimizer.step()
        compression.average()
        assert_identical(run.module)


def train_scaled(run, scaler, steps):
    for step in steps:
        run.optimizer.zero_grad()
        scaler.scale(loss_of(run.model, step)).backward()
        scaler.step(run.optimizer)
        scaler.update()


@case(front=FRONTS)
def two_optimizers_may_step_in_turn_under_a_scaler(front):
    """Each sees unscaled gradients, and none keeps a mark after close()."""
    run = Run(front, adamw, **SPARSE)
    first, second = run.optimizer, torch.optim.RMSprop(run.module.parameters(), lr=1e-4)
    scaler, norms = torch.amp.GradScaler("cpu", init_scale=2.0**10), []
    for optimizer in (first, second):
        optimizer.register_step_pre_hook(lambda *_: norms.append(nn.utils.get_total_norm([p.grad for p in params])))
    params = list(run.module.parameters())
    for step, run.optimizer in enumerate([first, second] * 3):
        train_scaled(run, scaler, [step])
    assert len(norms) == 6
    assert max(norms) < 20 * min(norms)
    run.compression.close()
    assert not any(getattr(each, "_step_supports_amp_scaling", False) for each in (first, second))


@case(ahead=(True, False))
def a_second_compressor_of_the_same_parameters_is_refused(ahead):
    """Also one of classic error feedback."""
    run = Run("dgc", adamw, **SPARSE)
    other = close_later(dgc.Compression.dgc(error_feedback="step-ahead" if ahead else "classic"))
    named = run.module.named_parameters()
    refused = lambda: dgc.DistributedOptimizer(adamw(run.module), named, compression=other)  # noqa: E731
    on_every_rank(dgc.ConfigError, "exchanged already, by another compressor", refused)


@case(front=FRONTS)
def a_scaled_loss_changes_nothing(front):
    models = []
    for scaled in (False, True):
        run = Run(front, adamw, **SPARSE)
        train_scaled(run, torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled), range(6))
        models.append(run.module)
    assert_close(*models)


@case(front=FRONTS, late=(False, True))
def an_update_that_is_not_finite_is_an_error_on_all_ranks(front, late):
    run = Run(front, sgd, late=late, **SPARSE).train(range(3))
    run.backward(3)
    if dist.get_rank() == 1:
        next(run.module.parameters()).grad[0] = torch.nan

    def step():
        run.optimizer.step()
        run.compression.average()

    met = "rank 1 in the update of '.*weight'" if dist.get_rank() == 1 else "rank 1, whose own message names"
    raises(dgc.errors.ConfigError, met, step)
    assert_shared(run)


@case(option=("weight_decay", "eps"))
def an_option_of_the_optimizer_that_differs_is_an_error_that_names_it(option):
    own = {option: 0.01 * (1 + dist.get_rank())}
    run = Run("dgc", lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, **own), **SPARSE)
    run.backward(0)
    met = f"'{option} of group 0' is 0.01 on rank 0 and 0.02 on rank 1"
    raises(dgc.errors.ConfigError, met, run.optimizer.step)


@case(late=(False, True))
def a_learning_rate_that_differs_later_is_an_error_that_names_it(late):
    run = Run("dgc", adamw, late=late, **SPARSE).train(range(2))
    run.optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())

    def step():
        run.backward(2)
        run.optimizer.step()
        run.compression.average()

    raises(dgc.errors.ConfigError, "'lr of group 0' is 0.1 on rank 0" if not late else "disagree", step)


@case
def a_layer_that_is_frozen_later_keeps_its_values():
    """Although the optimizer's other parameters decay."""
    run = Run("dgc", lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5), **SPARSE)
    run.train(range(3))
    run.compression.average()
    frozen = next(run.module.parameters())
    frozen.requires_grad_(False)
    before = frozen.clone()
    run.train(range(3, 13))
    run.compression.average()
    torch.testing.assert_close(frozen, before, rtol=0, atol=1e-7)


@case
def two_optimizers_of_one_ddp_model_are_an_error():
    run = Run("hook", lambda model: torch.optim.AdamW(list(model.parameters())[:-2]), **SPARSE)
    raises(dgc.errors.LayoutError, "one optimizer that owns all trained parameters", lambda: run.backward(0))


@case(late=(False, True))
def a_parameter_that_came_later_is_an_error_on_all_ranks(late):
    run = Run("dgc", sgd, late=late, **SPARSE).train(range(2))
    run.backward(2)
    extra = nn.Parameter(torch.ones(3))
    extra.grad = torch.ones(3)
    if dist.get_rank() == 0:
        run.optimizer.add_param_group({"params": [extra]})

    def step():
        run.optimizer.step()
        run.compression.average()

    raises(dgc.errors.LayoutError, "was not there", step)


NO_MEMORY = Mock(side_effect=MemoryError("no memory"))
"""What fails on rank 1, as if its memory were full."""


def lacking(target, name):
    return patch.object(target, name, NO_MEMORY) if dist.get_rank() == 1 else contextlib.nullcontext()


@case(late=(False, True), steps=(0, 2), where=("_read", "_gradients"))
def a_rank_without_memory_within_a_step_tells_the_others(late, steps, where):
    run = Run("dgc", adamw, late=late, **SPARSE).train(range(steps))
    with lacking(run.compression.engine, where):
        train = lambda: run.train(range(steps, steps + 2))  # noqa: E731
        on_every_rank((MemoryError, dgc.errors.RemoteError), "no memory", train)


@case
def a_rank_without_memory_for_an_average_tells_the_others():
    run = Run("dgc", adamw, **SPARSE).train(range(2))
    with lacking(run.compression.engine, "_read"):
        on_every_rank((MemoryError, dgc.errors.RemoteError), "no memory", run.compression.average)


@case
def a_rank_without_memory_for_the_others_optimizer_state_tells_them():
    run = Run("dgc", adamw, **SPARSE).train(range(2))
    stepped = run.optimizer if dist.get_rank() == 0 else adamw(run.module)
    full = Mock(wraps=np, zeros=NO_MEMORY, empty=NO_MEMORY)
    with patch("dgc.torch.step_ahead.np", full) if dist.get_rank() == 1 else contextlib.nullcontext():
        average = lambda: run.compression.average(stepped)  # noqa: E731
        on_every_rank((MemoryError, dgc.errors.RemoteError), "no memory", average)


@case
def an_embedding_with_sparse_gradients_is_trained():
    torch.manual_seed(0)
    model = nn.Embedding(200, 16, sparse=True)
    optimizer = wrapped(lambda model: torch.optim.SparseAdam(model.parameters(), lr=0.01), model, **SPARSE)
    before = model.weight.detach().clone()
    for step in range(4):
        optimizer.zero_grad()
        model(torch.arange(4) + 40 * step + 10 * dist.get_rank()).square().sum().backward()
        optimizer.step()
    optimizer.compression.average()
    assert int((model.weight != before).any(1).sum()) == 32
    assert_identical(model)


@case(dtype=("bfloat16", "float64"))
def parameters_of_other_types_are_trained(dtype):
    model = make_model().to(getattr(torch, dtype))
    optimizer = wrapped(sgd, model, **SPARSE)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 20, dtype=getattr(torch, dtype))).sum().backward()
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    optimizer.compression.average()
    assert_identical(model.double())


@case(late=(False, True))
def ranks_with_fewer_batches_join(late):
    run = Run("dgc", sgd, late=late, **SPARSE).train(range(3 + 2 * dist.get_rank()))
    assert dgc.join(run.compression) == 1
    assert_identical(run.module)
    assert_shared(run)
    run.train(range(10, 12))
    assert_shared(run)


@case(late=(False, True))
def ranks_join_before_the_last_of_the_steps(late):
    run = Run("dgc", adamw, steps=5, late=late, **AHEAD).train(range(3 + 2 * dist.get_rank()))
    assert dgc.join(run.compression) == 1
    assert_identical(run.module)


@case
def an_average_gives_all_ranks_the_states_that_only_some_have():
    """As of a branch that only one rank used."""
    run = Run("dgc", adamw, **SPARSE)
    run.backward(0)
    last = list(run.module.parameters())[-1]
    if dist.get_rank() == 1:
        last.grad = None
    run.optimizer.step()
    own = run.optimizer.state.get(last, {}).get("exp_avg", torch.zeros(0)).clone()
    run.compression.average(run.optimizer)
    assert_identical(run.module)
    states = [run.optimizer.state[p] for p in run.module.parameters()]
    assert_identical([state[key] for state in states for key in sorted(state)])
    assert run.optimizer.state[last]["step"] == 1
    if dist.get_rank() == 0:
        torch.testing.assert_close(run.optimizer.state[last]["exp_avg"], own, rtol=0, atol=0)
    run.train(range(1, 3))
    assert_shared(run)


class Counting(torch.optim.Optimizer):
    """Keeps a count that is a plain number, and a mean of the parameter's own type."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state.update(step=0, mean=torch.zeros_like(p), factor=None)
            state["step"] += 1
            state["mean"].lerp_(p.grad, 0.5)
            p.sub_(state["mean"], alpha=0.01)


@case
def an_average_makes_states_of_each_parameters_type():
    model = make_model().to(torch.bfloat16)
    model[0].float()
    optimizer = wrapped(lambda model: Counting(model.parameters()), model, **SPARSE)
    parameters = list(model.parameters())
    for step in range(3):
        for i, p in enumerate(parameters):
            p.grad = torch.full_like(p, 0.1 * (i + 1))
            if step and i == len(parameters) - 1 - dist.get_rank():
                p.grad = None
            if dist.get_rank() and i == 2:
                p.grad = None
        optimizer.step()
    optimizer.compression.average(optimizer)
    states = [optimizer.state[p] for p in parameters]
    assert all(state["mean"].dtype == p.dtype for state, p in zip(states, parameters, strict=True))
    assert [state["step"] for state in states] == [3] * len(states)
    assert_identical([state["mean"].float() for state in states])
    for p in parameters:
        p.grad = torch.full_like(p, 0.1)
    optimizer.step()
    optimizer.compression.average()
    assert_identical([p.float() for p in parameters])


@case
def a_parameter_of_one_element_has_an_averaged_state():
    model = make_model()
    model.scale = nn.Parameter(torch.ones(()))
    model.register_forward_hook(lambda model, inputs, output: output * model.scale)
    optimizer = wrapped(adamw, model, **SPARSE)
    train(model, optimizer, 3)
    optimizer.compression.average(optimizer)
    assert_identical([optimizer.state[model.scale]["exp_avg"], model.scale])


@case(late=(False, True))
def the_last_of_the_steps_averages(late):
    run = Run("dgc", adamw, steps=5, late=late, **AHEAD).train(range(5))
    assert_identical(run.module)
    run.train(range(5, 6))
    assert len(set(gathered(digest(run.module)))) == 2


# -- what is loaded ----------------------------------------------------------------------------------------------------


@case(late=(False, True))
def a_model_that_one_rank_loads_is_averaged_with_a_warning(late):
    run = Run("dgc", sgd, late=late, **SPARSE).train(range(4))
    if dist.get_rank() == 1:
        run.module.load_state_dict(make_model(9).state_dict())
    told = warned(lambda: run.train(range(4, 6)), "the parameters of rank 1 were changed")
    assert told == (dist.get_rank() == 0)
    assert_shared(run)
    run.compression.average()
    assert_identical(run.module)


@case
def weights_that_are_clamped_stay_near_their_limits():
    run = Run("dgc", lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3), **SPARSE)
    for step in range(30):
        run.train([step])
        for p in run.module.parameters():
            p.data.clamp_(-0.1, 0.1)
    assert_shared(run)
    run.compression.average()
    assert_identical(run.module)
    assert max(float(p.abs().max()) for p in run.module.parameters()) < 0.12


@case(late=(False, True))
def an_average_keeps_weights_that_were_loaded_before_it(late):
    run = Run("dgc", adamw, late=late, **SPARSE).train(range(4))
    other = make_model(seed=5)
    run.module.load_state_dict(other.state_dict())
    run.compression.average()
    assert_identical(run.module)
    for p, q in zip(run.module.parameters(), other.parameters(), strict=True):
        assert (p - q).abs().max() < (0.02 if late else 1e-6)  # late: what was under way is applied as well


# -- checkpoints -------------------------------------------------------------------------------------------------------


@case(front=FRONTS, late=(False, True), kind=("sgd", "adamw"))
def a_plain_checkpoint_after_an_average_resumes_bit_for_bit(front, late, kind):
    run = Run(front, OPTIMIZERS[kind], late=late, **SPARSE).train(range(6))
    run.compression.average(run.optimizer)
    saved = gathered(
        {"model": run.module.state_dict(), "optimizer": run.optimizer.state_dict(), "dgc": run.compression.state_dict()}
    )[0]
    run.train(range(6, 12))
    resumed = Run(front, OPTIMIZERS[kind], seed=3, late=late, **SPARSE)
    resumed.module.load_state_dict(saved["model"])
    resumed.optimizer.load_state_dict(saved["optimizer"])
    resumed.compression.load_state_dict(saved["dgc"])
    resumed.train(range(6, 12))
    assert digest(run.module) == digest(resumed.module)


@case(late=(False, True))
def a_state_of_ranks_that_differ_is_not_saved(late):
    run = Run("dgc", adamw, late=late, **SPARSE).train(range(3))
    raises(dgc.errors.LayoutError, "the ranks differ in their parameters or the optimizer", run.compression.state_dict)
    run.train(range(3, 6))
    run.compression.average()  # the optimizers' states still differ
    raises(dgc.errors.LayoutError, "the ranks differ", run.compression.state_dict)
    run.compression.average(run.optimizer)
    assert run.compression.state_dict()["step"] == 6


@case(how=("reset", "state of a new compressor", "state of one process"), layers=(1, 5), late=(False, True))
def layers_that_all_ranks_load_survive_a_reset(how, layers, late):
    run = Run("dgc", adamw, late=late, **SPARSE)
    empty = run.compression.state_dict() if "new" in how else {"inactive": True}
    run.train(range(4))
    run.module[:layers].load_state_dict(make_model(9)[:layers].state_dict())
    if how == "reset":
        run.compression.reset()
    else:
        run.compression.load_state_dict(empty)
    assert digest(run.module[:layers]) == digest(make_model(9)[:layers])
    assert_identical(run.module)
    assert run.compression.state_dict()["step"] == 0, "the ranks are equal"
    run.train(range(4))
    assert_shared(run)


@case(late=(False, True))
def a_reset_after_nan_leaves_finite_and_equal_parameters(late):
    run = Run("dgc", sgd, late=late, **SPARSE).train(range(4))
    run.backward(4)
    if dist.get_rank():
        next(run.module.parameters()).grad[:] = torch.nan
    with contextlib.suppress(dgc.ConfigError):
        run.optimizer.step()
    run.compression.reset()
    assert all(bool(p.isfinite().all()) for p in run.module.parameters())
    assert_identical(run.module)


@case
def a_checkpoint_of_bfloat16_resumes_bit_for_bit():
    def make(seed):
        model = make_model(seed).to(torch.bfloat16)
        optimizer = wrapped(adamw, model, **SPARSE)
        return model, optimizer, optimizer.compression

    def train(model, optimizer, _, steps):
        for step in steps:
            for i, p in enumerate(model.parameters()):
                p.grad = torch.full_like(p, 0.01 * (i + 1) * (step + 1) * (1 + dist.get_rank()))
            optimizer.step()

    straight, resumed = make(0), make(1)
    train(*straight, range(4))
    straight[2].average(straight[1])
    for each, other in zip(straight, resumed, strict=True):
        other.load_state_dict(copy.deepcopy(each.state_dict()))
    for each in (straight, resumed):
        train(*each, range(4, 8))
    assert [p.tolist() for p in straight[0].parameters()] == [p.tolist() for p in resumed[0].parameters()]


@case
def ranks_that_differ_are_an_error_in_each_step():
    run = Run("dgc", adamw, seed=dist.get_rank(), **SPARSE)
    for step in range(2):
        run.backward(step)
        on_every_rank(dgc.ConfigError, "do not train the same model.*broadcast_parameters", run.optimizer.step)


@case
def a_state_of_classic_error_feedback_is_refused():
    classic = Run("dgc", sgd, sparsity=0.95).train(range(2))
    state = classic.compression.state_dict(own=True)
    run = Run("dgc", sgd, **SPARSE)
    raises(dgc.errors.LayoutError, "classic", lambda: run.compression.load_state_dict(state))


# -- other ways --------------------------------------------------------------------------------------------------------


@case(name=("topk", "onebit", "strom"))
def other_compressors_step_ahead(name):
    model = make_model()
    compression = close_later(getattr(dgc.Compression, name)(**AHEAD))
    train(model, dgc.DistributedOptimizer(sgd(model), model.named_parameters(), compression=compression), 6)
    compression.average()
    assert_identical(model)


@case
def ddps_join_lets_ranks_end_early():
    run = Run("dense", sgd)
    compression = close_later(dgc.Compression.dgc(**SPARSE))
    state = dgc.ddp.register(run.model, run.optimizer, compression)
    with Join([run.model, state]):
        run.train(range(3 + 2 * dist.get_rank()))
    compression.average()
    assert_identical(run.module)


@case
def a_sharded_optimizer_is_refused():
    def sharded(model):
        return dgc.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    raises(dgc.errors.ConfigError, "only a share", lambda: Run("dgc", sharded, **SPARSE))


SMALL = {**SPARSE, "min_numel": 10**9}  # the first bucket has no sparsified tensors
ALONE = {
    "sgd": (sgd, SPARSE),
    "sgd, classic": (sgd, {"sparsity": 0.95, "error_feedback": "classic"}),
    "adamw": (adamw, SPARSE),
    "adamw, late": (adamw, {**SPARSE, "late": True}),
    "adamw, small": (adamw, SMALL),
    "adamw, small, late": (adamw, {**SMALL, "late": True}),
}


@case(front=FRONTS, kind=ALONE)
def an_average_on_one_rank_alone_is_an_error_on_all(front, kind):
    """As in a script that saves in ``if rank == 0``."""
    make_optimizer, options = ALONE[kind]
    run = Run(front, make_optimizer, **options).train(range(3))
    steps = (3, 4) if "late" in options else (3,)  # a late step ends in the next one
    action = (lambda: run.train(steps)) if dist.get_rank() else lambda: run.compression.average(run.optimizer)
    raises(dgc.errors.ConfigError, r"rank 0 failed in step 3: it calls average\(optimizer\)", action)


@case
def a_ddp_model_is_not_copied_and_the_module_inside_is():
    run = Run("hook", adamw, **SPARSE).train(range(1))
    raises(TypeError, r"AveragedModel\(model.module\)", lambda: torch.optim.swa_utils.AveragedModel(run.model))
    torch.optim.swa_utils.AveragedModel(run.model.module)
    run.train(range(1, 3))
    assert_shared(run)


@case(front=("dgc", "hook"), kind=("SGD", "AdamW"), feedback=("auto", "classic"))
def torchs_sharded_optimizer_is_refused(front, kind, feedback):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def sharded(model):
        return ZeroRedundancyOptimizer(model.parameters(), getattr(torch.optim, kind), lr=0.1)

    raises(
        dgc.errors.ConfigError,
        "replace it by dgc.torch.ZeroRedundancyOptimizer",
        lambda: Run(front, sharded, error_feedback=feedback),
    )


@case
def a_step_after_close_is_an_error():
    run = Run("dgc", adamw, **SPARSE).train(range(2))
    run.compression.average()
    run.compression.close()
    run.backward(2)
    raises(dgc.errors.TransportError, "was closed", run.optimizer.step)


@case(noise=DAMAGED)
def a_damaged_state_is_refused_before_anything_changes(noise):
    run = Run("dgc", adamw, **SPARSE).train(range(3))
    run.compression.average(run.optimizer)
    before = digest(run.module)
    saved = run.compression.state_dict()
    saved["noise"] = DAMAGED[noise]
    raises(dgc.errors.LayoutError, "damaged", lambda: run.compression.load_state_dict(saved))
    assert digest(run.module) == before


@case
def a_state_of_another_number_of_ranks_is_loaded():
    run = Run("dgc", adamw, **SPARSE).train(range(3))
    run.compression.average(run.optimizer)
    run.compression.load_state_dict({**run.compression.state_dict(), "noise": [[1.0] * 333] * 2})  # of other groups
    run.train(range(3, 6))
    run.compression.average()
    assert len(set(gathered(digest(run.module)))) == 1
