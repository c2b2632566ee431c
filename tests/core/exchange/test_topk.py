"""The encoder of plain selections: what it sends, what stays, and what a bucket that was begun early needs."""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from exchange_tools import gradient, parameters

from dgc.core.compressors import make_config
from dgc.core.exchange.encoders import BucketStep, DenseVector, TopKEncoder
from dgc.core.exchange.records import Hyper, StepContext, Submission, Submissions
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.layout import make_layout
from dgc.core.message import Sender
from dgc.core.plan import Mode
from dgc.core.state import BucketState

KERNELS = ReferenceKernels()


def prepared(density=0.1, ranks=2, kernels=KERNELS, algorithm="dgc", **options):
    config = make_config({"min_numel": 64, "values": "float32", **options}, algorithm=algorithm)
    layout = make_layout(parameters(), config)
    (bucket,) = layout.buckets
    step = StepContext(0, density, Hyper.uniform(5, config), 1.0, 0, Submissions(layout))
    for i, p in enumerate(layout.parameters):
        step.submissions.add(i, Submission(gradient(0, 0, i, p.numel), np.full(p.numel, 7, np.float32)))
    state = BucketState(bucket.size, bucket.sparse_size, len(bucket.sparse), "float32", KERNELS)
    vector = DenseVector(bucket, KERNELS)
    sender = Sender(0, SimpleNamespace(rank=0, size=ranks))
    encoder = TopKEncoder(bucket, config, kernels, ranks)
    return encoder, BucketStep(step, encoder.plan_at(density), state, sender, vector)


@pytest.mark.parametrize(("density", "ranks", "mode"), [(0.1, 2, Mode.SPARSE), (0.5, 64, Mode.SUM)])
def test_what_is_sent_and_what_stays_add_up(density, ranks, mode):
    encoder, at = prepared(density, ranks)
    step, plan, state = at.step, at.plan, at.state
    assert plan.mode is mode
    encoder.compress(at)
    for segment in encoder._bucket.sparse:
        np.testing.assert_array_equal(state.v[segment.slice], step.submissions[segment.parameter].gradient)
    assert encoder.commit(at, at.state).size == at.count
    sent = np.zeros_like(state.v)
    if mode is Mode.SPARSE:
        positions, values = plan.codec.decode(at.sender.payload, at.count)
        sent[positions] = values
    else:
        sent[: encoder._bucket.sparse_size] = at.vector.values[: encoder._bucket.sparse_size]
    assert np.count_nonzero(sent) == at.count == sum(plan.ks)
    for segment in encoder._bucket.sparse:
        np.testing.assert_array_equal((sent + state.v)[segment.slice], step.submissions[segment.parameter].gradient)


@pytest.mark.parametrize("refused", [False, True])
def test_without_error_feedback_nothing_stays_whatever_becomes_of_the_step(refused):
    encoder, at = prepared(algorithm="topk", error_feedback=False)
    state = at.state
    encoder.compress(at)
    assert at.count
    encoder.finish(at, refused=refused)
    assert not state.v.any()
    encoder.commit(at, at.state)
    assert not state.v.any()


def test_in_a_dense_step_the_kernels_have_nothing_to_do():
    encoder, at = prepared(None, kernels=Mock(spec=["memory"]))
    encoder.begin(at)
    encoder.abandon()
    encoder.compress(at)
    assert at.plan.mode is Mode.DENSE
    assert (at.count, at.sent) == (0, None)
    assert encoder.commit(at, at.state) is None


class Early(ReferenceKernels):
    def __init__(self):
        self.begun, self.finished = 0, 0

    def begin_selection(self, *arguments):
        self.begun += 1
        return lambda: self.finish(arguments)

    def finish(self, arguments):
        self.finished += 1
        return self.accumulate_and_select(*arguments)


def test_what_was_begun_is_finished_once_and_not_done_again():
    encoder, at = prepared(kernels=(kernels := Early()))
    plan = at.plan
    encoder.begin(at)
    encoder.compress(at)
    encoder.abandon()
    assert (kernels.begun, kernels.finished) == (1, 1)
    positions, values = plan.codec.decode(at.sender.payload, at.count)
    twin, at = prepared()
    twin.compress(at)
    for one, other in zip((positions, values), plan.codec.decode(at.sender.payload, at.count), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_was_begun_and_is_abandoned_runs_to_its_end_once():
    encoder, at = prepared(kernels=(kernels := Early()))
    encoder.begin(at)
    encoder.abandon()
    encoder.abandon()
    assert (kernels.begun, kernels.finished) == (1, 1)


def test_a_plan_is_made_once_for_each_density():
    encoder, *_ = prepared()
    assert encoder.plan_at(0.1) is encoder.plan_at(0.1)
    assert encoder.plan_at(0.1) is not encoder.plan_at(0.2)
