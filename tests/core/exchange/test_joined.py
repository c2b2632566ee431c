"""Ranks without data: they take part with zeros and the joined flag, until no rank has data."""

from dataclasses import replace

import numpy as np
import pytest
from exchange_tools import gradients, on_ranks, run_step
from fake_device import fake_kernels, needs_compiler

from dgc.core.exchange.step import Hyper, StepOptions
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.message import Flags
from dgc.errors import ConfigError

OPTIONS = {
    "selected": {"sparsity": 0.9, "momentum": 0.9},
    "dense sum": {"sparsity": 0.25, "indices": "uint16", "momentum": 0.9},
    "coded": {"sparsity": 0.9, "small": "int8", "values": "int8", "bucket_bytes": 2048},
    "terngrad": {"algorithm": "terngrad"},
}
WHEREVER = pytest.mark.parametrize("make_kernels", [NumbaKernels, pytest.param(fake_kernels, marks=needs_compiler)])


def content(exchange):
    """The state as comparable bytes."""
    saved = exchange.state_dict()
    arrays = {f"{n}.{k}": a.tobytes() for n, e in saved["parameters"].items() for k, a in e.items()}
    return {**arrays, "step": saved["step"]}


def step_with(exchange, joined, step):
    """A step in which these ranks have no data."""
    joins = exchange.transport.rank in joined
    grads = [g * (not joins) for g in gradients(step, exchange.transport.rank)]
    return run_step(exchange, grads, options=StepOptions(joins=Flags.JOINED if joins else 0))[1]


@WHEREVER
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_in_which_every_rank_has_joined_is_undone(name, make_kernels):
    if name == "terngrad" and make_kernels is fake_kernels:
        pytest.skip("works on host memory")

    def steps(exchange, rank):
        assert (exchange.ways() == "dense sum") is (name == "dense sum")
        for step in range(2):
            step_with(exchange, (), step)
        before = content(exchange)
        step_with(exchange, (0, 1), 2)
        assert set(exchange.joined) == {0, 1}
        assert content(exchange) == before

    on_ranks(2, steps, kernels=make_kernels(), **OPTIONS[name])


@WHEREVER
def test_a_step_in_which_some_ranks_have_joined_is_committed_on_all(make_kernels):
    def steps(exchange, rank):
        step_with(exchange, (), 0)
        norm = exchange.state.residual_norm()
        for step in range(1, 40):
            step_with(exchange, (1,), step)
        assert exchange.state.step == 40
        if rank == 1:
            assert exchange.state.residual_norm() < norm / 2, "a rank without data goes on sending its residual"

    on_ranks(2, steps, kernels=make_kernels(), **OPTIONS["selected"])


@pytest.mark.parametrize("recover", ["reset", "load_state_dict"])
def test_a_state_begins_without_joined_ranks(recover):
    """With the flag BY_TRAINING, the mean of the next step is that over the ranks that have not joined."""

    def steps(exchange, rank):
        saved = exchange.state_dict()
        joins = Flags.JOINED | Flags.BY_TRAINING if rank else 0
        run_step(exchange, gradients(0, rank), options=StepOptions(joins=joins))
        exchange.reset() if recover == "reset" else exchange.load_state_dict(saved)
        results = run_step(exchange, [np.ones_like(g) for g in gradients(1, rank)])[1]
        assert all(np.allclose(each, 1.0) for each in results)

    on_ranks(2, steps, sparsity=0.0, values="float32", small="float32")


def test_ranks_that_disagree_are_an_error_also_on_a_rank_without_data():
    """Otherwise it waits in the next step for ranks that have raised an error."""

    def steps(exchange, rank):
        hyper = Hyper.uniform(len(exchange.layout.parameters), exchange.config)
        options = StepOptions(replace(hyper, learning_rates=(0.1 * (1 + rank),)), joins=0 if rank else Flags.JOINED)
        with pytest.raises(ConfigError, match=r"rank 2 and rank 1 disagree in step 0|rank 1 and rank 2 disagree"):
            run_step(exchange, gradients(0, rank), options=options)

    on_ranks(3, steps, sparsity=0.9)
