"""What the exchange reads from its caller, and what it counts."""

from __future__ import annotations

import numpy as np
import pytest
from exchange_tools import (
    SHAPES,
    errors_of,
    gradient,
    make_exchange,
    parameters,
    run_step,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc.core.compressors import make_config
from dgc.core.exchange.records import Hyper, Submission, Submissions
from dgc.core.layout import make_layout
from dgc.errors import ConfigError, LayoutError


@pytest.mark.parametrize("later", [False, True])
def test_loss_scale_must_be_positive_and_finite(later):
    specs = parameters()

    def rank(transport):
        scale = 0.0 if transport.rank == 1 else 1.0
        exchange = make_exchange(transport, loss_scale=lambda: (lambda: scale) if later else scale)
        run_step(exchange, [gradient(0, 0, i, p.numel) for i, p in enumerate(specs)])

    errors = errors_of(2, rank)
    assert all(isinstance(e, ConfigError) and "loss_scale" in str(e) for e in errors), errors


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(len(SHAPES))))
def test_a_bucket_is_complete_with_its_last_gradient_in_whatever_order(order):
    layout = make_layout(parameters(), make_config({"min_numel": 64, "bucket_bytes": 2048}))
    given_so_far, item = Submissions(layout), Submission(np.zeros(1), np.zeros(1))
    for place, parameter in enumerate(order):
        assert set(given_so_far) == set(order[:place])
        bucket, _ = layout.places[parameter]
        members = {segment.parameter for segment in layout.buckets[bucket].segments}
        assert given_so_far.add(parameter, item) == (members <= set(order[: place + 1]))
        assert (given_so_far.missing[bucket] == 0) == (members <= set(order[: place + 1]))
        with pytest.raises(LayoutError, match="given twice"):
            given_so_far.add(parameter, item)
    assert not any(given_so_far.missing)


def test_ranks_compare_everything_that_they_must_share_and_no_rounding():
    def digest(**changes):
        plain = {"momentum": [0.9, 0.0], "nesterov": [True, False], "weight_decay": [0.0, 1e-4], "gain": [1.0, 0.1]}
        return Hyper(**{**plain, "learning_rates": (0.1, 0.01), **changes}).digest()

    changed = [
        {"momentum": [0.9, 0.5]},
        {"momentum": [0.0, 0.9]},
        {"nesterov": [False, True]},
        {"weight_decay": [0.0, 1e-4 + 1e-12]},
        {"gain": [1.0, 0.2]},
        {"learning_rates": (0.1,)},
        {"learning_rates": (0.01, 0.1)},
        {"learning_rates": (0.1, 0.010001)},
        {"restored": True},
    ]
    assert len({digest(), *(digest(**each) for each in changed)}) == 1 + len(changed)
    assert digest(learning_rates=(0.1 + 1e-9, 0.01)) == digest()
