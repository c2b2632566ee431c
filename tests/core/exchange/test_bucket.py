"""One bucket's message: what makes all ranks refuse a step, and what makes them fail together."""

import numpy as np
import pytest
from exchange_tools import errors_of, gradients, on_ranks, run_step

from dgc.core.compressors import make_config
from dgc.core.exchange.step import Submission, Submissions
from dgc.core.layout import Parameter, make_layout
from dgc.core.message import Messages


def test_result_beyond_the_gradients_type_refuses_the_step():
    def steps(exchange, rank):
        ones = [np.ones_like(g) for g in gradients(0, rank)]
        refused, _ = run_step(exchange, [g * 1000 for g in ones], limit=999.0)
        accepted, _ = run_step(exchange, [g * 0 for g in ones], limit=9999.0)
        return refused, accepted, exchange.state.step

    assert on_ranks(2, steps, sparsity=0.5) == [(True, False, 1)] * 2


@pytest.mark.parametrize(
    ("begin", "expected"), [(0, "rank 1 failed in step 0: "), (9, "rank 1 left before allreduce ")]
)
def test_a_rank_that_cannot_use_what_it_received_tells_the_others_in_the_next_bucket(monkeypatch, begin, expected):
    """Unless the bucket has another collective, in which no error can be told."""
    shapes = {"a": (600, 500), "b": (500, 600)}
    receive = Messages.receive

    def no_room(messages):
        if messages._transport.rank == 1:
            raise MemoryError("no room")
        return receive(messages)

    monkeypatch.setattr(Messages, "receive", no_room)

    def step(exchange, rank):
        plans = [bucket.plans[None if begin else 0.1] for bucket in exchange._buckets]
        assert [plan.vector.is_inline for plan in plans] == [begin == 0] * 2
        run_step(exchange, gradients(0, rank, shapes))

    errors = errors_of(2, step, shapes, sparsity=0.9, bucket_bytes=1_000_000, rampup_begin_step=begin)
    assert str(errors[0]).startswith(expected)
    assert "MemoryError: no room" in str(errors[1])


def test_a_bucket_is_complete_once_the_events_of_its_gradients_are_recorded():
    """The communication thread looks without the lock, and kernels would read gradients before they are made."""
    layout = make_layout([Parameter(n, (8,), "float32") for n in "ab"], make_config({}))
    submissions, missing = Submissions(layout), []

    class Ready:
        stream = 0

        def record(self):
            missing.append(list(submissions.missing))
            return "event"

    for i in range(2):
        submissions.add(i, Submission(np.zeros(8, np.float32), np.zeros(8, np.float32), ready=Ready()))
    assert (missing, submissions.missing, submissions.events) == ([[1]], [0], {0: ["event"]})
