"""Ranks without data: they take part with zeros and the joined flag, until no rank has data."""

import numpy as np
import pytest
from exchange_tools import gradients, on_ranks, run_step
from fake_device import fake_kernels, needs_compiler

from dgc.core.exchange.step import StepOptions
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.message import Flags


def step_with(exchange, joined, step):
    """A step in which these ranks have no data."""
    joins = exchange.transport.rank in joined
    grads = [g * (not joins) for g in gradients(step, exchange.transport.rank)]
    return run_step(exchange, grads, options=StepOptions(joins=Flags.JOINED if joins else 0))[1]


def test_a_step_of_a_quantizer_in_which_every_rank_has_joined_is_undone():
    """Other steps: test_plans.py."""

    def steps(exchange, rank):
        step_with(exchange, (), 0)
        before = exchange.state_dict()
        step_with(exchange, (0, 1), 1)
        assert set(exchange.joined) == {0, 1}
        np.testing.assert_equal(exchange.state_dict(), before)

    on_ranks(2, steps, algorithm="terngrad")


@pytest.mark.parametrize("make_kernels", [NumbaKernels, pytest.param(fake_kernels, marks=needs_compiler)])
def test_a_step_in_which_some_ranks_have_joined_is_committed_on_all(make_kernels):
    def steps(exchange, rank):
        step_with(exchange, (), 0)
        norm = exchange.state.residual_norm()
        for step in range(1, 40):
            step_with(exchange, (1,), step)
        assert exchange.state.step == 40
        if rank == 1:
            assert exchange.state.residual_norm() < norm / 2, "a rank without data goes on sending its residual"

    on_ranks(2, steps, kernels=make_kernels(), sparsity=0.9, momentum=0.9)


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
