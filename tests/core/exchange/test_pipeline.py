"""In which order buckets run changes nothing: gradients in any order, and buckets that threads begin early."""

from functools import partial

import numpy as np
import pytest
from exchange_tools import gradients, on_ranks, run_step, same_results
from fake_device import fake_kernels, host

from dgc.core.exchange.bucket import BucketExchange
from dgc.core.kernels.cpu import NumbaKernels
from dgc.errors import DGCError

SHAPES = {"a": (300, 400), "b": (400, 500), "small": (20,), "c": (280, 300), "d": (100, 900)}


class LateKernels(NumbaKernels):
    """Threads that come as late as they may: nothing is done before its result is asked for."""

    overlaps = True

    def __init__(self):
        super().__init__(1)

    def begin_selection(self, work, u, v, thresholds):
        begin = super().begin_selection
        return lambda: begin(work, u, v, thresholds)()


OPTIONS = dict(bucket_bytes=400_000, momentum=0.9, sparsity=0.99, values="float16")
BUCKETS = 4


def on(ranks, function, kernels, **options):
    return on_ranks(ranks, function, SHAPES, kernels=kernels, **{**OPTIONS, **options})


def train(kernels, steps=6, **options):
    """Two ranks; returns per rank the results of every step, and u and v after the last."""

    def one_rank(exchange, rank):
        assert len(exchange.layout.buckets) == BUCKETS
        seen = []
        for step in range(steps):
            given = gradients(step, rank, SHAPES)
            if step == 3 and rank == 1:
                given[1][7] = np.inf
            refused, results = run_step(exchange, given)
            assert refused == (step == 3)
            seen.append(results)
        return seen, [(b.u.copy(), b.v.copy()) for b in exchange.state.buckets]

    return on(2, one_rank, kernels, **options)


def submit_at_once(exchange, given):
    """All gradients are there before the first bucket may run."""
    with exchange.latest.lock:
        for i, g in enumerate(given):
            exchange.submit(i, g, np.empty(g.size, np.float32))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rampup_begin_step": 2},
        {"error_feedback": False},
        {"local_grad_clip_norm": 1.0},
        {"local_grad_clip_norm": 1.0, "clip_scope": "global"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kernels", [NumbaKernels(2), NumbaKernels(5), LateKernels()], ids=["2", "5", "late"])
def test_with_threads_to_spare_everything_is_the_same(kernels, options):
    assert kernels.overlaps
    assert not NumbaKernels(1).overlaps
    for wanted, got in zip(train(NumbaKernels(1), **options), train(kernels, **options), strict=True):
        same_results(wanted[0], got[0])
        same_results(wanted[1], got[1])


@pytest.mark.parametrize("threads", [1, 3])
def test_the_next_bucket_is_begun_before_one_has_run_where_threads_are_to_spare(threads, monkeypatch):
    events = []

    def note(name):
        real = getattr(BucketExchange, name)

        def noted(self):
            events.append((name, self.bucket.index))
            return real(self)

        monkeypatch.setattr(BucketExchange, name, noted)

    note("begin")
    note("run")

    def step(exchange, rank):
        submit_at_once(exchange, gradients(0, 0, SHAPES))
        exchange.finish()

    on(1, step, NumbaKernels(threads))
    if threads == 1:
        assert events == [(name, b) for b in range(BUCKETS) for name in ("run", "begin")]
    else:
        expected = [("begin", 0)]
        for b in range(BUCKETS):
            expected += [("begin", b + 1), ("run", b)] if b + 1 < BUCKETS else [("run", b)]
        assert events == expected


@pytest.mark.parametrize("fails", ["the first bucket, with the second begun", "to begin the third bucket"])
def test_a_failure_with_a_bucket_begun_reaches_all_ranks_and_leaves_nothing_running(fails, monkeypatch):
    def broken(*_, **__):
        raise MemoryError("no memory left")

    def steps(exchange, rank):
        run_step(exchange, gradients(0, rank, SHAPES))
        buckets = exchange._buckets
        if rank == 1:
            if fails == "to begin the third bucket":
                buckets[2].plan.encoder.begin = broken
            else:
                buckets[0].plan.messages.finish = broken
        with pytest.raises(DGCError, match="no memory left"):
            run_step(exchange, gradients(1, rank, SHAPES))
        assert all(bucket._begun is None for bucket in buckets)
        vars(buckets[2].plan.encoder).pop("begin", None)
        vars(buckets[0].plan.messages).pop("finish", None)
        exchange.reset()
        return [run_step(exchange, gradients(step, rank, SHAPES))[1] for step in range(3)]

    for again in on(2, steps, NumbaKernels(3)):
        same_results(train(NumbaKernels(1), 3)[0][0], again)


@pytest.mark.parametrize("make_kernels", [lambda: NumbaKernels(3), fake_kernels], ids=["threads", "device"])
def test_a_bucket_that_failed_before_its_turn_takes_its_gradients_in_at_most_once(make_kernels):
    def step(exchange, rank):
        begin, calls = exchange.kernels.begin_selection, []

        def fails_once(work, u, v, thresholds):
            finish = begin(work, u, v, thresholds)
            calls.append(finish)
            if len(calls) == 2:
                finish()
                raise MemoryError("late")
            return finish

        exchange.kernels.begin_selection = fails_once
        given = gradients(0, 0, SHAPES)
        submit_at_once(exchange, given)  # the second bucket is begun before its turn
        with pytest.raises(DGCError, match="late"):
            exchange.finish()
        first, second = exchange.layout.buckets[:2]
        assert len(calls) == 2
        for segment in (*first.sparse, *second.sparse):
            u = host(exchange.state.momentum_buffer(segment.parameter))
            np.testing.assert_array_equal(u, given[segment.parameter])

    on(1, step, make_kernels())


@pytest.mark.parametrize("order", ["forward", "random"])
def test_order_of_gradients_does_not_matter(order):
    def five_steps(exchange, rank, order):
        assert len(exchange.layout.buckets) > 1
        outs = []
        for step in range(5):
            grads = gradients(step, rank)
            places = list(range(len(grads)))
            if order == "random":
                np.random.default_rng([step, rank]).shuffle(places)
            outs.append(run_step(exchange, grads, order=order and places)[1])
        return outs

    options = {"sparsity": 0.9, "momentum": 0.9, "bucket_bytes": 2048}
    usual, found = (on_ranks(2, partial(five_steps, order=each), **options) for each in (None, order))
    same_results(usual[0], found[1])
