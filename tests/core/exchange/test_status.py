"""The states of a step: what a failure, a reset or a loaded state leaves, on every rank."""

from __future__ import annotations

import functools
import re
import threading
from pathlib import Path
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

from dgc.core.exchange.status import Phase
from dgc.core.kernels.cpu.backend import NumbaKernels
from dgc.errors import DGCError, LayoutError, RemoteError, TransportError, WireError
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

    assert run_ranks(2, rank) == [1, 1]


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

    out = run_ranks(2, rank)
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

    assert run_ranks(2, rank) == [1, 1]


def test_reset_after_a_mask_was_interrupted_starts_anew():
    specs = parameters()

    def rank(transport):
        exchange = make_exchange(transport, kernels=NumbaKernels(1), sparsity=0.9, momentum=0.9)
        grads = first_gradients(transport.rank)
        for i in range(len(specs)):
            exchange.submit(i, grads[i], np.empty_like(grads[i]))
        exchange.wait()
        exchange._buckets[0].outcome.undo.finish = Mock(side_effect=[KeyboardInterrupt, RuntimeError("not done")])
        with pytest.raises(KeyboardInterrupt):
            exchange.finish()
        exchange.reset()
        refused, _ = run_step(exchange, grads)
        exchange.close()
        return refused, exchange.state.step

    assert run_ranks(2, rank) == [(False, 1)] * 2


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

    assert run_ranks(2, rank) == [(False, 1)] * 2


# -- the table of docs/architecture.md, row by row ------------------------------------------------------------------

EVENTS = {}
"""First column of the table -> its test."""


def event(text):
    def note(function):
        EVENTS[text] = function
        return function

    return note


def phase_of(exchange):
    return exchange._status.phase


def submit(exchange, indices=None):
    grads = first_gradients(exchange.transport.rank)
    for i in range(len(SHAPES)) if indices is None else indices:
        exchange.submit(i, grads[i], np.empty_like(grads[i]))


def lose_the_network(exchange, error=None):
    def lost(*_):
        raise error or TransportError("the network is gone")

    exchange.transport.allgather = lost


def alone(function):
    """Run on the only rank there is, with an exchange whose state is not zero."""

    def rank(transport):
        exchange = make_exchange(transport, sparsity=0.9, momentum=0.9, bucket_bytes=2048)
        assert len(exchange.layout.buckets) > 1
        run_step(exchange, first_gradients(0))
        function(exchange)
        exchange.close()

    run_ranks(1, rank)


def bring_to(exchange, phase):
    """Let a step come to a phase."""
    gather = exchange.transport.allgather
    if phase is Phase.RUNNING:
        submit(exchange, [0])
    elif phase is Phase.THROUGH:
        submit(exchange)
        exchange.wait()
    elif phase in (Phase.BROKEN, Phase.FAILED):
        lose_the_network(exchange)
        submit(exchange)
        exchange.wait()
        if phase is Phase.FAILED:
            with pytest.raises(TransportError):
                exchange.finish()
        exchange.transport.allgather = gather
    assert phase_of(exchange) is phase


@event("first gradient of a step")
def begins():
    def step(exchange):
        assert phase_of(exchange) is Phase.IDLE
        submit(exchange, [0])
        assert phase_of(exchange) is Phase.RUNNING
        exchange.reset()

    alone(step)


@event("last bucket has run")
def goes_through():
    def step(exchange):
        submit(exchange, range(1, len(SHAPES)))
        assert phase_of(exchange) is Phase.RUNNING
        assert not exchange.wait(0.05), "a gradient is missing"
        submit(exchange, [0])
        assert exchange.wait()
        assert phase_of(exchange) is Phase.THROUGH
        exchange.finish()

    alone(step)


@event("`finish()`: the step counts, or is refused because a value is not finite")
def ends():
    def step(exchange):
        before = exchange.state.step
        for bad in (False, True):
            grads = first_gradients(0)
            grads[0][0] = np.nan if bad else 0
            assert run_step(exchange, grads)[0] is bad
            assert phase_of(exchange) is Phase.IDLE
            assert exchange.state.step == before + 1

    alone(step)


@event("this rank meets an error before or between its messages: announced, told in the next bucket's message")
def meets_an_error():
    def rank(transport):
        exchange = make_exchange(transport, sparsity=0.9, bucket_bytes=2048)
        if transport.rank == 1:
            exchange._buckets[1].encoder.compress = Mock(side_effect=MemoryError("no room"))
        submit(exchange)
        exchange.wait()
        assert phase_of(exchange) is Phase.BROKEN
        assert "rank 1 failed in step 0: MemoryError: no room" in str(exchange._status.error)
        assert (exchange._status.announced is not None) == (transport.rank == 1)
        exchange.close()

    run_ranks(3, rank)


@event("this rank meets an error when its last bucket is through: announced; this step counts, as on the others")
def meets_an_error_too_late():
    def rank(transport):
        exchange = make_exchange(transport, sparsity=0.9)
        submit(exchange)
        exchange.wait()
        if transport.rank == 1:
            with pytest.raises(LayoutError, match="given twice"):
                submit(exchange, [0])
        else:
            exchange.finish()
        assert phase_of(exchange) is Phase.IDLE
        assert exchange.owes_failure == (transport.rank == 1)
        assert exchange.state.step == 1
        submit(exchange)
        exchange.wait()
        assert phase_of(exchange) is Phase.BROKEN, "the first message of the next step tells it"
        assert "rank 1 failed in step 1: " in str(exchange._status.error)
        exchange.close()

    run_ranks(2, rank)


@event("a message carries an error, is damaged, or a collective fails")
def receives_an_error():
    def collective(exchange):
        bring_to(exchange, Phase.BROKEN)
        assert isinstance(exchange._status.error, TransportError)

    def damaged(exchange):
        gather = exchange.transport.allgather

        def damage(message, out):
            gather(message, out)
            out[0, 0] ^= 0xFF

        exchange.transport.allgather = damage
        submit(exchange)
        exchange.wait()
        assert phase_of(exchange) is Phase.BROKEN
        assert isinstance(exchange._status.error, WireError)

    alone(collective)
    alone(damaged)


@event("`finish()` or `fail()` puts back what was sent and raises")
def puts_back():
    def last_message_lost(exchange):
        """Let all buckets but the last one go out."""
        gather, sent = exchange.transport.allgather, []

        def lose_the_last(message, out):
            gather(message, out)
            sent.append(message)
            if len(sent) == len(exchange.layout.buckets):
                raise TransportError("the network is gone")

        exchange.transport.allgather = lose_the_last

    for end in (lambda exchange: exchange.finish(), lambda exchange: exchange.fail(LayoutError("mine"))):

        def step(exchange, end=end):
            names = [name for name, entry in exchange.state.to_dict()["parameters"].items() if "v" in entry]
            before = exchange.state.to_dict()["parameters"]
            last_message_lost(exchange)
            submit(exchange)
            exchange.wait()
            assert phase_of(exchange) is Phase.BROKEN
            with pytest.raises(TransportError, match="the network is gone"):
                end(exchange)
            assert phase_of(exchange) is Phase.FAILED
            after = exchange.state.to_dict()["parameters"]
            for name in names:
                g = first_gradients(0)[list(SHAPES).index(name)]
                u = np.float32(0.9) * before[name]["u"] + g
                np.testing.assert_allclose(after[name]["u"], u, rtol=1e-6)
                np.testing.assert_allclose(after[name]["v"], before[name]["v"] + u, rtol=1e-5, atol=1e-7)

        alone(step)


@event("`state_dict()`, `save_checkpoint()`")
def is_not_saved():
    """Nor in a step, nor by a rank whose error the others have not heard of yet."""

    def step(exchange):
        for phase in (Phase.RUNNING, Phase.THROUGH, Phase.BROKEN, Phase.FAILED):
            bring_to(exchange, phase)
            text = (
                "after a step that failed .*the network is gone" if phase is Phase.FAILED else "while a step is under"
            )
            with pytest.raises(LayoutError, match=text):
                exchange.state_dict()
            exchange.reset()
            assert exchange.state_dict()["step"] == 0
        submit(exchange)
        exchange.wait()
        with pytest.raises(LayoutError, match="mine"):
            exchange.fail(LayoutError("mine"))
        assert exchange.owes_failure
        with pytest.raises(LayoutError, match=r"after a step that failed \(mine\)"):
            exchange.state_dict()

    alone(step)


@event("any gradient")
def is_refused():
    def step(exchange):
        bring_to(exchange, Phase.FAILED)
        for _ in range(2):
            with pytest.raises(RemoteError, match=r"the network is gone.*call reset\(\) or load_state_dict\(\)"):
                submit(exchange, [0])
            assert phase_of(exchange) is Phase.FAILED

    alone(step)


@event(
    "`reset()`, `load_state_dict()`; a step under way is given up first, announced and put back (`Exchange.abandon`)"
)
def recovers():
    for phase in Phase:
        for load in (False, True):

            def step(exchange, phase=phase, load=load):
                saved = exchange.state_dict()
                bring_to(exchange, phase)
                if phase is Phase.RUNNING:
                    announce = exchange._status.announce = Mock(wraps=exchange._status.announce)
                exchange.load_state_dict(saved) if load else exchange.reset()
                assert phase is not Phase.RUNNING or announce.called
                assert phase_of(exchange) is Phase.IDLE
                assert exchange._status.announced is None
                assert exchange.state.step == (saved["step"] if load else 0)
                assert run_step(exchange, first_gradients(0))[0] is False

            alone(step)


@event("`close()`")
def closes():
    for phase in Phase:

        def step(exchange, phase=phase):
            bring_to(exchange, phase)
            thread = exchange._pipeline._thread
            assert thread.is_alive()
            assert exchange.close()
            assert not thread.is_alive()
            assert phase_of(exchange) is (Phase.BROKEN if phase is Phase.RUNNING else phase)
            with pytest.raises(DGCError, match="closed"):
                submit(exchange, [0])
            assert thread not in threading.enumerate()

        alone(step)


def documented_events():
    text = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text()
    table = text.split("| event | from | to |")[1].split("\n\n")[0]
    return [row.split(" | ")[0].removeprefix("| ") for row in re.findall(r"^\| .*$", table, flags=re.MULTILINE)]


def test_every_row_of_the_table_has_a_test():
    assert documented_events() == list(EVENTS)


@pytest.mark.parametrize("text", EVENTS)
def test_row(text):
    EVENTS[text]()
