"""In which order buckets run changes nothing: gradients in any order, and buckets that threads begin early."""

import numpy as np
import pytest
from exchange_tools import gradient, make_exchange, parameters, run_step, same_results
from exchange_tools import train as train_small
from fake_device import fake_kernels, host

from dgc.core.exchange.bucket import BucketStep
from dgc.core.kernels.cpu import NumbaKernels
from dgc.errors import DGCError
from dgc.transport.local import run_ranks

SHAPES = {"a": (300, 400), "b": (400, 500), "small": (20,), "c": (280, 300), "d": (100, 900)}


class LateKernels(NumbaKernels):
    """Threads that come as late as they may: nothing is done before its result is asked for."""

    overlaps = True

    def __init__(self):
        super().__init__(1)

    def begin_selection(self, work, u, v, thresholds):
        begin = super().begin_selection
        return lambda: begin(work, u, v, thresholds)()


OPTIONS = dict(shapes=SHAPES, bucket_bytes=400_000, momentum=0.9, sparsity=0.99, values="float16")
BUCKETS = 4


def gradients(step, rank):
    return [gradient(step, rank, i, p.numel) for i, p in enumerate(parameters(SHAPES))]


def train(kernels, steps=6, **options):
    """Two ranks; returns per rank the results of every step, and u and v after the last."""

    def one_rank(transport):
        exchange = make_exchange(transport, kernels=kernels, **{**OPTIONS, **options})
        assert len(exchange.layout.buckets) == BUCKETS
        seen = []
        for step in range(steps):
            given = gradients(step, transport.rank)
            if step == 3 and transport.rank == 1:
                given[1][7] = np.inf
            refused, results = run_step(exchange, given)
            assert refused == (step == 3)
            seen.append(results)
        state = [(b.u.copy(), b.v.copy()) for b in exchange.state.buckets]
        exchange.close()
        return seen, state

    return run_ranks(2, one_rank)


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
@pytest.mark.parametrize("kernels", [NumbaKernels(3), LateKernels()], ids=["threads", "late"])
def test_with_threads_to_spare_everything_is_the_same(kernels, options):
    for wanted, got in zip(train(NumbaKernels(1), **options), train(kernels, **options), strict=True):
        same_results(wanted[0], got[0])
        same_results(wanted[1], got[1])


@pytest.mark.parametrize("threads", [1, 3])
def test_the_next_bucket_is_begun_before_one_has_run_where_threads_are_to_spare(threads, monkeypatch):
    events = []

    def note(name):
        real = getattr(BucketStep, name)

        def noted(self):
            events.append((name, self._parts.bucket.index))
            return real(self)

        monkeypatch.setattr(BucketStep, name, noted)

    note("begin")
    note("run")

    def one_rank(transport):
        exchange = make_exchange(transport, kernels=NumbaKernels(threads), **OPTIONS)
        given = gradients(0, 0)
        # All gradients are there before the first bucket may run.
        with exchange.latest.lock:
            run_all = [exchange.submit(i, g, np.empty(g.size, np.float32)) for i, g in enumerate(given)]
        assert len(run_all) == len(given)
        exchange.finish()
        exchange.close()

    run_ranks(1, one_rank)
    if threads == 1:
        assert events == [("run", b) for b in range(BUCKETS)]
    else:
        expected = [("begin", 0)]
        for b in range(BUCKETS):
            expected += [("begin", b + 1), ("run", b)] if b + 1 < BUCKETS else [("run", b)]
        assert events == expected


@pytest.mark.parametrize("fails", ["the first bucket, with the second begun", "to begin the third bucket"])
def test_a_failure_with_a_bucket_begun_reaches_all_ranks_and_leaves_nothing_running(fails, monkeypatch):
    def broken(*_, **__):
        raise MemoryError("no memory left")

    def one_rank(transport):
        exchange = make_exchange(transport, kernels=NumbaKernels(3), **OPTIONS)
        run_step(exchange, gradients(0, transport.rank))
        buckets = exchange._buckets
        if transport.rank == 1:
            if fails == "to begin the third bucket":
                buckets[2].encoder.begin = broken
            else:
                buckets[0].messages.finish = broken
        with pytest.raises(DGCError, match="no memory left"):
            run_step(exchange, gradients(1, transport.rank))
        assert all(bucket.at._begun is None for bucket in buckets)
        vars(buckets[2].encoder).pop("begin", None)
        vars(buckets[0].messages).pop("finish", None)
        exchange.reset()
        again = [run_step(exchange, gradients(step, transport.rank))[1] for step in range(3)]
        exchange.close()
        return again

    for again in run_ranks(2, one_rank):
        same_results(train(NumbaKernels(1), 3)[0][0], again)


@pytest.mark.parametrize("make_kernels", [lambda: NumbaKernels(3), fake_kernels], ids=["threads", "device"])
def test_a_bucket_that_failed_before_its_turn_takes_its_gradients_in_at_most_once(make_kernels):
    def one_rank(transport):
        exchange = make_exchange(transport, kernels=make_kernels(), **OPTIONS)
        begin, calls = exchange.kernels.begin_selection, []

        def fails_once(work, u, v, thresholds):
            finish = begin(work, u, v, thresholds)
            calls.append(finish)
            if len(calls) == 2:
                finish()
                raise MemoryError("late")
            return finish

        exchange.kernels.begin_selection = fails_once
        given = gradients(0, 0)
        with exchange.latest.lock:  # the second bucket is begun before its turn
            for i, g in enumerate(given):
                exchange.submit(i, g, np.empty(g.size, np.float32))
        with pytest.raises(DGCError, match="late"):
            exchange.finish()
        first, second = exchange.layout.buckets[:2]
        assert len(calls) == 2
        for segment in (*first.sparse, *second.sparse):
            u = host(exchange.state.momentum_buffer(segment.parameter))
            np.testing.assert_array_equal(u, given[segment.parameter])
        exchange.close()

    run_ranks(1, one_rank)


@pytest.mark.parametrize("order", ["forward", "random"])
def test_order_of_gradients_does_not_matter(order):
    specs, options = parameters(), {"sparsity": 0.9, "momentum": 0.9, "bucket_bytes": 2048}

    def rank(transport):
        exchange = make_exchange(transport, **options)
        assert len(exchange.layout.buckets) > 1
        outs = []
        for step in range(5):
            grads = [gradient(step, transport.rank, i, p.numel) for i, p in enumerate(specs)]
            shuffled = list(range(len(specs)))
            if order == "random":
                np.random.default_rng([step, transport.rank]).shuffle(shuffled)
            outs.append(run_step(exchange, grads, order=shuffled)[1])
        exchange.close()
        return outs

    shuffled = run_ranks(2, rank)
    usual = []
    train_small(2, 5, **options, on_step=lambda r, s, e, p, res: usual.append(res) if r == 0 else None)
    same_results(usual, shuffled[1])
