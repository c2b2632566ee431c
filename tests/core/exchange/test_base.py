"""What all encoders share: whether there is anything to do, and the work of a step."""

from types import SimpleNamespace

import numpy as np
import pytest
from exchange_tools import parameters

from dgc.core.compressors import make_config
from dgc.core.exchange.encoders import TopKEncoder
from dgc.core.exchange.records import Hyper, StepContext, Submission, Submissions
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.layout import make_layout


@pytest.mark.parametrize(
    ("density", "tensors", "active"), [(None, True, False), (0.1, False, False), (0.1, True, True)]
)
def test_there_is_something_to_do_in_a_sparsified_step_with_tensors(density, tensors, active):
    config = make_config({"min_numel": 64 if tensors else 10**6})
    (bucket,) = make_layout(parameters(), config).buckets
    assert TopKEncoder(bucket, config, ReferenceKernels(), 2).plan_at(density).is_active is active


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
    encoder = TopKEncoder(bucket, config, ReferenceKernels(), 4)
    work = encoder._work(SimpleNamespace(step=step, plan=SimpleNamespace(ks=ks)))
    assert len(work) == len(bucket.sparse) > 1
    for w, segment, k in zip(work, bucket.sparse, ks, strict=True):
        i = segment.parameter
        assert w.gradient is step.submissions[i].gradient
        assert w.parameter is (step.submissions[i].parameter if decay else None)
        assert (w.offset, w.length, w.k) == (segment.offset, segment.length, k)
        assert (w.momentum, w.nesterov) == (hyper.momentum[i], hyper.nesterov[i])
        assert (w.weight_decay, w.scale) == (decay * share, 1 / 8)
