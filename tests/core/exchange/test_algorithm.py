"""An algorithm's collectives before its message: the same whether a rank compresses or has given up."""

import numpy as np
import pytest
from exchange_tools import gradient, parameters

from dgc.core.compressors import compressor_class, compressor_names, make_config
from dgc.core.exchange.encoders import AlgorithmEncoder, BucketStep, DenseVector
from dgc.core.exchange.records import Hyper, StepContext, Submission, Submissions
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.layout import make_layout
from dgc.core.message import Sender
from dgc.core.state import BucketState

OPTIONS = [
    *(
        (name, {})
        for name in compressor_names()
        if not compressor_class(name).is_plain_selection(make_config({}, algorithm=name))
    ),
]


class Recorded:
    """A transport of two ranks, of which the other always has less."""

    rank, size, name = 0, 2, "recorded"

    def __init__(self):
        self.calls = []

    def allreduce(self, array, op="sum"):
        self.calls.append((array.size, op))


def prepared(name, options, density=0.5):
    config = make_config({"min_numel": 64, **options}, algorithm=name)
    layout = make_layout(parameters(), config)
    (bucket,) = layout.buckets
    transport, kernels = Recorded(), ReferenceKernels()
    encoder = AlgorithmEncoder(bucket, compressor_class(name)(config), kernels, transport, layout)
    step = StepContext(0, density, Hyper.uniform(5, config), 1.0, 0, Submissions(layout))
    for i, p in enumerate(layout.parameters):
        step.submissions.add(i, Submission(gradient(0, 0, i, p.numel), np.full(p.numel, 7, np.float32)))
    state = BucketState(bucket.size, bucket.sparse_size, len(bucket.sparse), "float32", kernels)
    sender, vector = Sender(0, transport), DenseVector(bucket, kernels)
    return encoder, BucketStep(step, encoder.plan_at(density), state, sender, vector), transport


@pytest.mark.parametrize("density", [0.5, 0.01, None])
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_a_rank_that_gave_up_makes_the_collectives_of_the_others(name, options, density):
    encoder, at, transport = prepared(name, options, density)
    plan = at.plan
    encoder.compress(at)
    fitted, at.plan = at.plan, plan
    compressed, transport.calls = transport.calls, []
    # After it has failed at the end, nothing is left to do.
    encoder.catch_up(at)
    assert at.plan == fitted
    assert transport.calls == []
    other, at, transport = prepared(name, options, density)
    other.catch_up(at)
    assert transport.calls == compressed
    assert at.plan.mode is fitted.mode


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_what_was_sent_leaves_the_residual_when_the_step_counts(name, options):
    encoder, at, _ = prepared(name, options)
    state = at.state
    encoder.compress(at)
    before = state.v.copy()
    assert before.any()
    encoder.finish(at, refused=False)
    if not encoder._algorithm.error_feedback:
        assert not state.v.any()
        encoder.commit(at, state)
        assert not state.v.any()
        return
    np.testing.assert_array_equal(state.v, before)
    encoder.commit(at, state)
    assert not np.array_equal(state.v, before)


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_a_refused_step_leaves_the_residual(name, options):
    encoder, at, _ = prepared(name, options)
    state = at.state
    encoder.compress(at)
    before = state.v.copy()
    encoder.finish(at, refused=True)
    np.testing.assert_array_equal(state.v, before if encoder._algorithm.error_feedback else 0)


@pytest.mark.parametrize(
    ("name", "options", "density", "clears"),
    [
        ("strom", {"max_density": 1.0, "threshold": 0.05}, 1.0, False),
        ("strom", {"max_density": 0.9, "threshold": 0.05}, 1.0, True),
        ("dryden", {"sparsity": 0.0}, 1.0, False),
        ("dryden", {"sparsity": 0.5}, 0.5, True),
        ("adacomp", {}, 1.0, True),
    ],
)
def test_no_momentum_is_cleared_where_no_entry_waits_for_room(name, options, density, clears):
    """Also where entries are not sent: those below a threshold, and zeros."""
    options = {"momentum": 0.9, "momentum_masking": True, **options}
    encoder, at, _ = prepared(name, options, density)
    state = at.state
    state.u[:] = 1.0
    for i in range(5):
        at.step.submissions[i].gradient[:3] = -0.9  # these have nothing to send
    encoder.compress(at)
    velocity = state.u.copy()
    encoder.commit(at, state)
    assert 0 < at.count < state.v.size
    assert (state.u != velocity).any() == clears
