"""``Join`` with DDP's communication hook, under torchrun: ranks with different numbers of batches."""

import contextlib

import torch
import torch.distributed as dist
from adapters_torch.torchrun_tools import (
    EXACT,
    assert_close,
    assert_identical,
    loss_of,
    make_model,
    on_every_rank,
)
from ddp_tools import LEFT, adamw, dense, hooked, sgd, train
from torch import nn
from torch.distributed.algorithms.join import Join
from worker_tools import case, close_later

import dgc.torch as dgc

KINDS = {"all sent": EXACT, "momentum stays": LEFT, "sparse": {"sparsity": 0.99}}


def accumulate(model, optimizer, passes):
    """Without no_sync(); every second pass is followed by a step."""
    for step in range(passes):
        loss_of(model, step).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


@case(difference=(1, 5, 17), kind=KINDS)
def join_with_the_state(difference, kind):
    model, optimizer, state = hooked(make_model(width=128), options=KINDS[kind])
    reference = dense(make_model(width=128))
    count = 2 + difference * dist.get_rank()
    with Join([model, state]):
        train(model, optimizer, count)
    with Join([reference[0]]):
        train(*reference, count)
    assert_identical(model)
    assert state.compression.stats.steps == 2 + difference * (dist.get_world_size() - 1)
    if kind != "sparse":
        assert_close(model, reference[0])
    train(model, optimizer, 5, start=30)
    assert_identical(model)


FEEDBACK = {
    "step-ahead": {},
    "late": {"error_feedback": "step-ahead", "late": True},
    "classic": {"error_feedback": "classic"},
}


@case(feedback=FEEDBACK)
def join_in_the_middle_of_an_accumulation(feedback):
    """Rank 1 ends inside no_sync(): what it has accumulated is dropped, as by DDP, and replicas stay alike."""
    model, optimizer, state = hooked(make_model(), adamw, {"sparsity": 0.9, **FEEDBACK[feedback]})
    with Join([model, state]):
        for step in range(10 - 5 * dist.get_rank()):
            with contextlib.nullcontext() if step % 2 else model.no_sync():
                loss_of(model, step).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    state.compression.average()
    assert_identical(model)
    train(model, optimizer, 5, start=30)
    state.compression.average()
    assert_identical(model)


@case(counts=((6, 3), (6, 6), (1, 6)))
def with_step_ahead_each_pass_within_join_needs_a_step(counts):
    """An accumulation without no_sync() is an error on all ranks; outside of Join it works."""
    model, optimizer, state = hooked(make_model(), adamw, {"sparsity": 0.9})

    def within_join():
        with Join([model, state]):
            accumulate(model, optimizer, counts[dist.get_rank()])

    accumulate(model, optimizer, 4)
    with Join([model, state]):
        train(model, optimizer, 1 + 2 * dist.get_rank())
    accumulate(model, optimizer, 4)
    state.compression.average()
    assert_identical(model)
    on_every_rank(dgc.ConfigError, r"call model.no_sync\(\) for each pass that no step\(\) follows", within_join)


@case(feedback=("step-ahead", "late"))
def at_the_end_of_join_unsent_updates_of_all_ranks_count(feedback):
    """Each rank moves a row of its own; with a small rate Adam moves it by that rate in each step."""
    module = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(module.weight)
    options, rank = {"sparsity": 0.999, **FEEDBACK[feedback]}, dist.get_rank()
    model, optimizer, state = hooked(module, lambda m: adamw(m, weight_decay=0.0), options)
    with Join([model, state]):
        for _ in range(20 + rank):
            optimizer.zero_grad()
            model(torch.ones(1, 64))[:, rank].sum().backward()
            optimizer.step()
    assert_identical(model)
    moved = (-module.weight.detach().mean(1)[:2]).tolist()
    assert 0.8 < moved[0] / moved[1] < 1.2, moved


@case
def a_join_that_is_over_or_not_enabled_changes_nothing_later():
    model, optimizer = dense(make_model(), adamw)
    with Join([model]):  # before the registration
        train(model, optimizer, 2 + dist.get_rank())
    state = dgc.ddp.register(model, optimizer, close_later(dgc.Compression.dgc(sparsity=0.9)))
    accumulate(model, optimizer, 4)
    with Join([model, state], enable=False):
        accumulate(model, optimizer, 4)
    with contextlib.suppress(KeyError), Join([model, state]):
        train(model, optimizer, 1)
        raise KeyError
    accumulate(model, optimizer, 4)
    state.compression.average()
    assert_identical(model)


OPTIMIZERS = {"step-ahead": adamw, "momentum": sgd, "neither": lambda m: torch.optim.SGD(m.parameters(), lr=0.1)}


@case(kind=OPTIMIZERS)
def join_without_the_state_is_refused_with_step_ahead_and_where_the_compressor_has_momentum(kind):
    model, optimizer, _ = hooked(make_model(), OPTIMIZERS[kind], {"sparsity": 0.9})

    def uneven():
        with Join([model]):
            train(model, optimizer, 3 + 4 * dist.get_rank())
        assert_identical(model)
        train(model, optimizer, 5, start=30)
        assert_identical(model)

    if kind == "neither":
        uneven()
    else:
        on_every_rank(dgc.ConfigError, r"use Join\(\[model, state\]\)", uneven)


@case
def wrong_arguments_of_join():
    model, _, state = hooked(make_model())
    on_every_rank(dgc.ConfigError, r"Join\(\[model, state\]\)", lambda: Join([state, model]))
    on_every_rank(dgc.ConfigError, "divides by all", lambda: Join([model, state], divide_by_initial_world_size=False))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    model, _, state = hooked(make_model(), options={"loss_scale": scaler})
    on_every_rank(dgc.ConfigError, r"Join\(\[model\]\) alone", lambda: Join([model, state]))
