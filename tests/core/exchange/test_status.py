"""The states of a step: what a failure, a reset or a loaded state leaves, on every rank."""

from __future__ import annotations

import functools
from unittest.mock import Mock

import numpy as np
import pytest
from exchange_tools import (
    SHAPES,
    first_gradients,
    gradient,
    make_exchange,
    parameters,
    run_step,
)

from dgc.core.kernels.cpu.backend import NumbaKernels
from dgc.errors import LayoutError, RemoteError
from dgc.transport.local import run_ranks


def test_a_rank_that_fails_again_after_its_error_begins_no_step_that_the_others_are_not_in():
    def rank(transport):
        exchange = make_exchange(transport, sparsity=0.9)
        grads = first_gradients(transport.rank)
        if transport.rank == 1:
            with pytest.raises(LayoutError, match=r"^rank 1 failed in step 0: mine$"):
                exchange.fail(LayoutError("mine"))
            for _ in range(2):
                with pytest.raises(RemoteError, match=r"mine\); call reset"):
                    exchange.fail(LayoutError("mine again"))
        else:
            with pytest.raises(LayoutError, match="rank 1 failed in step 0: mine"):
                run_step(exchange, grads)
        exchange.reset()
        run_step(exchange, grads)
        exchange.close()
        return exchange.state.step

    assert run_ranks(2, rank, timeout=20) == [1, 1]


@pytest.mark.parametrize("after", ["next step", "finish", "reset"])
def test_a_failure_after_the_last_bucket_reaches_all_ranks_in_the_next_step(after):
    """It is raised on its own rank at once; the step that it came too late for counts on all ranks alike."""
    specs = parameters()
    options = dict(sparsity=(0.5, 0.75, 0.9), rampup_step=3, momentum=0.9, bucket_bytes=2048)

    def rank(transport):
        exchange = make_exchange(transport, **options)
        grads = first_gradients(transport.rank)
        results = [np.empty_like(g) for g in grads]
        for i in reversed(range(len(specs))):
            exchange.submit(i, grads[i], results[i])
        exchange.wait()
        if transport.rank == 0:
            with pytest.raises(LayoutError, match=r"^the gradient of 'fc.weight' was given twice"):
                exchange.submit(2, grads[2], results[2])
            assert exchange.owes_failure
        else:
            assert not exchange.finish()
        next_step = functools.partial(run_step, exchange, grads)
        if after != "reset":
            go_on = exchange.finish if after == "finish" and transport.rank == 0 else next_step
            with pytest.raises(LayoutError, match=r"rank 0 failed in step 1: .*'fc.weight' was given twice"):
                go_on()
            with pytest.raises(RemoteError, match="call reset"):
                run_step(exchange, grads)
        state = exchange.state.to_dict()
        exchange.reset()
        run_step(exchange, grads)
        exchange.close()
        return results, state, exchange.state.step

    out = run_ranks(2, rank, timeout=20)
    assert [steps for _, _, steps in out] == [1, 1]
    assert [state["step"] for _, state, _ in out] == [1, 1]
    for a, b in zip(out[0][0], out[1][0], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("given", [0, 1, len(SHAPES)])
def test_a_state_that_is_refused_after_a_failed_step_does_not_let_training_go_on(given):
    """A step that failed before its first gradient, or was interrupted after some or all of them."""

    def rank(transport):
        exchange = make_exchange(transport, sparsity=0.9)
        grads = first_gradients(transport.rank)
        state = exchange.state_dict()
        for i in range(given):
            exchange.submit(i, grads[i], np.empty_like(grads[i]))
        if given == len(SHAPES):
            exchange.wait()
        if not given:
            with pytest.raises(LayoutError, match="mine"):
                exchange.fail(LayoutError("mine"))
        with pytest.raises(LayoutError, match="this is rank"):
            exchange.load_state_dict({**state, "rank": 7})
        with pytest.raises(RemoteError, match="given up" if given else "mine"):
            run_step(exchange, grads)
        exchange.load_state_dict(state)
        run_step(exchange, grads)
        exchange.close()
        return exchange.state.step

    assert run_ranks(2, rank, timeout=20) == [1, 1]


def test_reset_after_a_mask_was_interrupted_starts_anew():
    specs = parameters()

    def rank(transport):
        exchange = make_exchange(transport, kernels=NumbaKernels(1), sparsity=0.9, momentum=0.9)
        grads = first_gradients(transport.rank)
        for i in range(len(specs)):
            exchange.submit(i, grads[i], np.empty_like(grads[i]))
        exchange.wait()
        exchange._buckets[0].outcome.kept.finish = Mock(side_effect=[KeyboardInterrupt, RuntimeError("not done")])
        with pytest.raises(KeyboardInterrupt):
            exchange.finish()
        exchange.reset()
        refused, _ = run_step(exchange, grads)
        exchange.close()
        return refused, exchange.state.step

    assert run_ranks(2, rank, timeout=20) == [(False, 1)] * 2


def test_reset_after_an_abandoned_step_starts_anew():
    specs = parameters()

    def rank(transport):
        exchange = make_exchange(transport, sparsity=0.9, momentum=0.9)
        exchange.submit(1, gradient(0, 0, 1, specs[1].numel), np.empty(specs[1].numel, np.float32))
        exchange.reset()
        grads = [gradient(0, transport.rank, i, p.numel) for i, p in enumerate(specs)]
        refused, _ = run_step(exchange, grads)
        exchange.close()
        return refused, exchange.state.step

    assert run_ranks(2, rank, timeout=20) == [(False, 1)] * 2
