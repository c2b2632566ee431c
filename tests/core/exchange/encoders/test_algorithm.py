"""An algorithm's collectives before its message: the same whether a rank compresses or has given up."""

import numpy as np
import pytest
from exchange_tools import gradient, parameters

from dgc.core.compressors.build import make_config
from dgc.core.compressors.registry import compressor_class, compressor_names
from dgc.core.exchange.encoders.algorithm import AlgorithmEncoder
from dgc.core.exchange.encoders.base import Buffers
from dgc.core.exchange.encoders.dense_vector import DenseVector
from dgc.core.exchange.records import Hyper, Outcome, StepContext, Submission, Submissions
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.state.layout import make_layout
from dgc.core.state.state import BucketState
from dgc.core.wire.message import Sender

OPTIONS = [
    *(
        (name, {})
        for name in compressor_names()
        if not compressor_class(name).is_plain_selection(make_config({}, algorithm=name))
    ),
    ("qsgd", {"coding": "elias"}),
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
    buffers = Buffers(Sender(0, transport), DenseVector(bucket, kernels))
    return encoder, step, state, buffers, transport


@pytest.mark.parametrize("density", [0.5, 0.01, None])
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_a_rank_that_gave_up_makes_the_collectives_of_the_others(name, options, density):
    encoder, step, state, buffers, transport = prepared(name, options, density)
    plan = encoder.plan(step)
    fitted = encoder.compress(step, plan, state, buffers, Outcome())
    compressed, transport.calls = transport.calls, []
    # After it has failed at the end, nothing is left to do.
    assert encoder.catch_up(step, plan) == fitted
    assert transport.calls == []
    other, step, _, _, transport = prepared(name, options, density)
    caught_up = other.catch_up(step, plan)
    assert transport.calls == compressed
    assert caught_up.mode is fitted.mode


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_what_was_sent_leaves_the_residual_when_the_step_counts(name, options):
    encoder, step, state, buffers, _ = prepared(name, options)
    plan, outcome = encoder.plan(step), Outcome()
    plan = encoder.compress(step, plan, state, buffers, outcome)
    before = state.v.copy()
    assert before.any()
    encoder.finish(step, plan, state, refused=False)
    if not encoder._algorithm.error_feedback:
        assert not state.v.any()
        assert f"{name} keeps no residual" in encoder.why_empty(step, plan)
        encoder.commit(step, plan, state, outcome)
        assert not state.v.any()
        return
    np.testing.assert_array_equal(state.v, before)
    encoder.commit(step, plan, state, outcome)
    assert not np.array_equal(state.v, before)
    assert encoder.why_empty(step, plan) is None


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_a_refused_step_leaves_the_residual(name, options):
    encoder, step, state, buffers, _ = prepared(name, options)
    plan = encoder.compress(step, encoder.plan(step), state, buffers, Outcome())
    before = state.v.copy()
    encoder.finish(step, plan, state, refused=True)
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
    encoder, step, state, buffers, _ = prepared(name, options, density)
    state.u[:] = 1.0
    for i in range(5):
        step.submissions[i].gradient[:3] = -0.9  # these have nothing to send
    outcome = Outcome()
    plan = encoder.compress(step, encoder.plan(step), state, buffers, outcome)
    velocity = state.u.copy()
    encoder.commit(step, plan, state, outcome)
    assert 0 < outcome.count < state.v.size
    assert (state.u != velocity).any() == clears
