"""The states of a step: what a failure, a reset or a loaded state leaves, on every rank."""

import functools
import threading
from unittest.mock import Mock

import numpy as np
import pytest
from exchange_tools import SHAPES, gradients, on_ranks, run_step
from fake_device import fake_kernels, needs_compiler

from dgc.core.exchange.stages import TABLE, Event, LatestStep, Stage
from dgc.core.kernels.reference import ReferenceKernels
from dgc.errors import DGCError, LayoutError, RemoteError, TransportError

WHEREVER = pytest.mark.parametrize(
    "make_kernels", [ReferenceKernels, pytest.param(fake_kernels, marks=needs_compiler)], ids=["host", "device"]
)


def steps_after_reset(exchange, grads):
    """How many steps count once the exchange has been reset and has made another one."""
    exchange.reset()
    run_step(exchange, grads)
    return exchange.state.step


@pytest.mark.parametrize("options", [{"sparsity": 0.9}, {"algorithm": "terngrad", "rampup_begin_step": 5}], ids=str)
def test_a_rank_that_fails_once_or_again_calls_only_what_the_others_call(options):
    """TernGrad's ranks agree on a scale by an allreduce, but not in a step that is sent dense."""

    def steps(exchange, rank):
        grads = gradients(0, rank)
        if rank == 1:
            with pytest.raises(LayoutError, match=r"^rank 1 failed in step 0: mine$"):
                exchange.fail(LayoutError("mine"))
            for _ in range(2):
                with pytest.raises(RemoteError, match=r"mine\); call reset"):
                    exchange.fail(LayoutError("mine again"))
        else:
            with pytest.raises(LayoutError, match="rank 1 failed in step 0: mine"):
                run_step(exchange, grads)
        return steps_after_reset(exchange, grads)

    assert on_ranks(2, steps, **options) == [1, 1]


def test_a_step_that_begins_while_another_one_is_under_way_is_an_error_on_all_ranks():
    def steps(exchange, rank):
        if rank == 1:  # an interrupt, say, in the middle of the first one
            submit(exchange, [0])
        with pytest.raises(LayoutError, match=r"a step begins while another one is under way; .* call reset"):
            run_step(exchange, gradients(0, rank))
        return steps_after_reset(exchange, gradients(0, rank))

    assert on_ranks(2, steps, sparsity=0.9) == [1, 1]


@pytest.mark.parametrize("after", ["next step", "finish", "reset"])
def test_a_failure_after_the_last_bucket_reaches_all_ranks_in_the_next_step(after):
    """It is raised on its own rank at once; the step that it came too late for counts on all ranks alike."""

    def steps(exchange, rank):
        grads = gradients(0, rank)
        results = [np.empty_like(g) for g in grads]
        for i in reversed(range(len(grads))):
            exchange.submit(i, grads[i], results[i])
        exchange.wait()
        if rank == 0:
            with pytest.raises(LayoutError, match=r"^the gradient of 'fc.weight' was given twice"):
                exchange.submit(2, grads[2], results[2])
            assert exchange.latest.failure_pending
        else:
            assert not exchange.finish()
        next_step = functools.partial(run_step, exchange, grads)
        if after != "reset":
            go_on = exchange.finish if after == "finish" and rank == 0 else next_step
            with pytest.raises(LayoutError, match=r"rank 0 failed in step 1: .*'fc.weight' was given twice"):
                go_on()
            with pytest.raises(RemoteError, match="call reset"):
                run_step(exchange, grads)
        state = exchange.state.to_dict()
        return results, state, steps_after_reset(exchange, grads)

    out = on_ranks(2, steps, sparsity=(0.5, 0.75, 0.9), rampup_step=3, momentum=0.9, bucket_bytes=2048)
    assert [steps for _, _, steps in out] == [1, 1]
    assert [state["step"] for _, state, _ in out] == [1, 1]
    for a, b in zip(out[0][0], out[1][0], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("given", [0, 1, len(SHAPES)])
def test_a_state_that_is_refused_after_a_failed_step_does_not_let_training_go_on(given):
    """A step that failed before its first gradient, or was interrupted after some or all of them."""

    def steps(exchange, rank):
        state = exchange.state_dict()
        if given:
            submit(exchange, range(given))
        if given == len(SHAPES):
            exchange.wait()
        if not given:
            with pytest.raises(LayoutError, match="mine"):
                exchange.fail(LayoutError("mine"))
        with pytest.raises(LayoutError, match="op=sum, this job has op=average"):
            exchange.load_state_dict({**state, "op": "sum"})
        with pytest.raises(RemoteError, match="given up" if given else "mine"):
            run_step(exchange, gradients(0, rank))
        exchange.load_state_dict(state)
        run_step(exchange, gradients(0, rank))
        return exchange.state.step

    assert on_ranks(2, steps, sparsity=0.9) == [1, 1]


@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()], ids=repr)
def test_a_commit_that_fails_in_the_middle_is_made_once_and_the_other_ranks_are_told(error):
    """In the next step, because they have committed this one. Until then nothing can be saved."""

    def steps(exchange, rank):
        run_step(exchange, gradients(0, rank))
        usual, calls = exchange.kernels.take_out, []

        def fail_in_the_second_bucket(*arguments, **options):
            calls.append(1)
            if rank == 1 and len(calls) == 2:
                raise error
            return usual(*arguments, **options)

        exchange.kernels.take_out = fail_in_the_second_bucket
        submit(exchange)
        if rank == 1:
            with pytest.raises((KeyboardInterrupt, RemoteError)):
                exchange.finish()
            with pytest.raises(LayoutError, match="after a step that failed"):
                exchange.state_dict()
        else:
            assert not exchange.finish()
        assert exchange.state.step == 2
        go_on = exchange.finish if rank == 1 else functools.partial(run_step, exchange, gradients(2, rank))
        with pytest.raises(RemoteError, match=f"rank 1 failed in step 2: {type(error).__name__}"):
            go_on()
        return len(calls), steps_after_reset(exchange, gradients(0, rank))

    assert on_ranks(2, steps, sparsity=0.9, momentum=0.9, bucket_bytes=2048) == [(2, 1)] * 2


# -- the events, one by one ------------------------------------------------------------------------------------------


def stage_of(exchange):
    return exchange.latest.stage


def submit(exchange, indices=None):
    if not exchange.in_step:
        exchange.begin()
    grads = gradients(0, exchange.transport.rank)
    for i in range(len(SHAPES)) if indices is None else indices:
        exchange.submit(i, grads[i], np.empty_like(grads[i]))


def lose_the_network(exchange):
    def lost(*_):
        raise TransportError("the network is gone")

    exchange.transport.allgather = lost


def alone(function, make_kernels=ReferenceKernels):
    """Run on the only rank there is, with an exchange whose state is not zero."""

    def steps(exchange, rank):
        assert len(exchange.layout.buckets) > 1
        run_step(exchange, gradients(0, 0))
        exchange.load_state_dict(exchange.state_dict())
        assert stage_of(exchange) is Stage.NONE
        function(exchange)

    on_ranks(1, steps, kernels=make_kernels(), sparsity=0.9, momentum=0.9, bucket_bytes=2048)


def bring_to(exchange, stage):
    """Let a step come to a stage by what its callers do."""
    gather = exchange.transport.allgather
    if stage is Stage.OPEN:
        submit(exchange, [0])
    elif stage is Stage.THROUGH:
        submit(exchange)
        exchange.wait()
    elif stage is Stage.COMMITTED:
        run_step(exchange, gradients(0, 0))
    elif stage is Stage.REFUSED:
        grads = gradients(0, 0)
        grads[0][0] = np.nan
        assert run_step(exchange, grads)[0]
    elif stage in (Stage.BROKEN, Stage.FAILED):
        lose_the_network(exchange)
        submit(exchange)
        exchange.wait()
        if stage is Stage.FAILED:
            with pytest.raises(TransportError):
                exchange.finish()
        exchange.transport.allgather = gather
    assert stage_of(exchange) is stage


@pytest.mark.parametrize("stage", Stage, ids=lambda stage: stage.name)
@pytest.mark.parametrize("event", Event, ids=lambda event: event.name)
def test_an_event_leads_to_one_stage_and_is_an_error_in_all_others(stage, event):
    """That callers bring a step to these stages: ``bring_to``, and the tests below."""
    latest = LatestStep()
    latest.stage = stage
    if (stage, event) in TABLE:
        latest.enter(event)
        assert latest.stage is TABLE[stage, event]
        return
    with pytest.raises(RuntimeError, match=f"{event.name} came in the stage {stage.name}"):
        latest.enter(event)
    assert latest.stage is stage


# -- what callers see in those stages ---------------------------------------------------------------------------------


def test_a_step_is_not_through_before_its_last_gradient():
    def step(exchange):
        submit(exchange, range(1, len(SHAPES)))
        assert not exchange.wait(0.05), "a gradient is missing"
        assert stage_of(exchange) is Stage.OPEN
        submit(exchange, [0])
        assert exchange.wait()
        assert stage_of(exchange) is Stage.THROUGH
        exchange.finish()

    alone(step)


def test_an_error_before_or_between_messages_is_told_in_the_next_one():
    def step(exchange, rank):
        if rank == 1:
            exchange._buckets[1].plans[1 - 0.9].encoder.select = Mock(side_effect=MemoryError("no room"))
        submit(exchange)
        exchange.wait()
        assert stage_of(exchange) is Stage.BROKEN
        assert "rank 1 failed in step 0: MemoryError: no room" in str(exchange.latest.error)
        assert (exchange.latest.announced is not None) == (rank == 1)

    on_ranks(3, step, sparsity=0.9, bucket_bytes=2048)


@WHEREVER
@pytest.mark.parametrize("end", ["finish", "fail"])
def test_what_was_sent_in_a_failed_step_is_still_there(end, make_kernels):
    def last_message_lost(exchange):
        """Let all buckets but the last one go out."""
        gather, sent = exchange.transport.allgather, []

        def lose_the_last(message, out):
            gather(message, out)
            sent.append(message)
            if len(sent) == len(exchange.layout.buckets):
                raise TransportError("the network is gone")

        exchange.transport.allgather = lose_the_last

    def step(exchange):
        names = [name for name, entry in exchange.state.to_dict()["parameters"].items() if "v" in entry]
        before = exchange.state.to_dict()["parameters"]
        last_message_lost(exchange)
        submit(exchange)
        exchange.wait()
        assert stage_of(exchange) is Stage.BROKEN
        with pytest.raises(TransportError, match="the network is gone"):
            exchange.finish() if end == "finish" else exchange.fail(LayoutError("mine"))
        assert stage_of(exchange) is Stage.FAILED
        after = exchange.state.to_dict()["parameters"]
        for name in names:
            g = gradients(0, 0)[list(SHAPES).index(name)]
            u = np.float32(0.9) * before[name]["u"] + g
            np.testing.assert_allclose(after[name]["u"], u, rtol=1e-6)
            np.testing.assert_allclose(after[name]["v"], before[name]["v"] + u, rtol=1e-5, atol=1e-7)

    alone(step, make_kernels)


def test_no_state_is_saved_in_a_step_or_after_a_failure():
    """Nor by a rank whose error the others have not heard of yet."""

    def step(exchange):
        for stage in (Stage.OPEN, Stage.THROUGH, Stage.BROKEN, Stage.FAILED):
            bring_to(exchange, stage)
            text = (
                "after a step that failed .*the network is gone" if stage is Stage.FAILED else "while a step is under"
            )
            with pytest.raises(LayoutError, match=text):
                exchange.state_dict()
            exchange.reset()
            assert exchange.state_dict()["step"] == 0
        submit(exchange)
        exchange.wait()
        with pytest.raises(LayoutError, match="mine"):
            exchange.fail(LayoutError("mine"))
        assert exchange.latest.failure_pending
        with pytest.raises(LayoutError, match=r"after a step that failed \(mine\)"):
            exchange.state_dict()

    alone(step)


@WHEREVER
@pytest.mark.filterwarnings("ignore:NaN, infinity")
@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("stage", Stage)
def test_a_reset_or_a_loaded_state_makes_any_step_usable_again(stage, load, make_kernels):
    """A step under way is given up first, and announced."""

    def step(exchange):
        saved = exchange.state_dict()
        bring_to(exchange, stage)
        if stage is Stage.OPEN:
            announce = exchange.latest.announce = Mock(wraps=exchange.latest.announce)
        exchange.load_state_dict(saved) if load else exchange.reset()
        assert stage is not Stage.OPEN or announce.called
        assert stage_of(exchange) is Stage.NONE
        assert exchange.latest.announced is None
        assert exchange.state.step == (saved["step"] if load else 0)
        assert run_step(exchange, gradients(0, 0))[0] is False

    alone(step, make_kernels)


@pytest.mark.filterwarnings("ignore:NaN, infinity")
@pytest.mark.parametrize("stage", Stage)
def test_close_ends_the_thread(stage):
    def step(exchange):
        bring_to(exchange, stage)
        thread = exchange._pipeline._thread
        assert thread.is_alive()
        assert exchange.close()
        assert not thread.is_alive()
        assert stage_of(exchange) is (Stage.BROKEN if stage is Stage.OPEN else stage)
        with pytest.raises(DGCError, match="closed"):
            submit(exchange, [0])
        assert thread not in threading.enumerate()

    alone(step)
