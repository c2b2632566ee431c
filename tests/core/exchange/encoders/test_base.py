"""What all encoders share: buffers that follow the plan, sizes of a schedule, and the work of a step."""

from types import SimpleNamespace
from unittest.mock import Mock, call

import numpy as np
import pytest
from exchange_tools import parameters

from dgc.core.compressors.build import make_config
from dgc.core.exchange.encoders.base import Buffers, Encoder, is_active, segment_work
from dgc.core.exchange.records import Hyper, StepContext, Submission, Submissions
from dgc.core.state.layout import make_layout
from dgc.core.wire.plan import Mode


def test_the_vector_waits_before_its_memory_is_replaced_and_only_then():
    calls = Mock()
    buffers = Buffers(calls.sender, calls.vector)
    step = SimpleNamespace(fingerprint=5)
    for plan in ("a", "a", "b"):
        buffers.start(step, plan)
    assert calls.mock_calls == [
        call.vector.wait_for_buffers(), call.sender.start("a", 5), call.vector.start("a"),
        call.sender.start("a", 5), call.vector.start("a"),
        call.vector.wait_for_buffers(), call.sender.start("b", 5), call.vector.start("b"),
    ]  # fmt: skip
    assert buffers.payload is calls.sender.payload


def test_a_schedule_is_checked_at_each_of_its_densities():
    encoder = Mock()
    Encoder.check_sizes(encoder, (0.75, 0.999))
    assert [c.args[0] for c in encoder.plan_at.mock_calls] == pytest.approx([0.25, 0.001])


@pytest.mark.parametrize(("mode", "tensors", "active"), [
    (Mode.DENSE, (1,), False), (Mode.SPARSE, (), False), (Mode.SPARSE, (0,), True), (Mode.SUM, (1,), True),
])  # fmt: skip
def test_there_is_something_to_do_in_a_sparsified_step_with_tensors(mode, tensors, active):
    assert is_active(SimpleNamespace(mode=mode), tensors) == active


@pytest.mark.parametrize(("op", "share"), [("average", 1.0), ("sum", 0.25)])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_the_work_of_a_step_is_that_of_the_sparsified_tensors(op, share, decay):
    """With a sum over 4 ranks, each adds a quarter of the weight decay; without decay nobody reads parameters."""
    config = make_config({"min_numel": 64, "op": op})
    layout = make_layout(parameters(), config)
    (bucket,) = layout.buckets
    hyper = Hyper.uniform(5, config)
    hyper.momentum = [0.1 * i for i in range(5)]
    hyper.nesterov, hyper.weight_decay = [True, False] * 2 + [True], [decay] * 5
    step = StepContext(0, 0.1, hyper, 8.0, 0, Submissions(layout))
    for i, p in enumerate(layout.parameters):
        step.submissions.add(
            i, Submission(np.zeros(p.numel, np.float32), np.zeros(p.numel, np.float32), np.ones(p.numel))
        )
    ks = tuple(range(3, 3 + len(bucket.sparse)))
    work = segment_work(bucket, config, SimpleNamespace(step=step, plan=SimpleNamespace(ks=ks)), 4)
    assert len(work) == len(bucket.sparse) > 1
    for w, segment, k in zip(work, bucket.sparse, ks, strict=True):
        i = segment.parameter
        assert w.gradient is step.submissions[i].gradient
        assert w.parameter is (step.submissions[i].parameter if decay else None)
        assert (w.offset, w.length, w.k) == (segment.offset, segment.length, k)
        assert (w.momentum, w.nesterov) == (hyper.momentum[i], hyper.nesterov[i])
        assert (w.weight_decay, w.scale) == (decay * share, 1 / 8)
