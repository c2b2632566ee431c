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
    train,
)

from dgc.errors import ConfigError


def test_entries_sent_are_at_most_k_and_the_largest():
    from dgc.core.config.schedule import entries_to_send

    kept = {}

    def look(rank, step, exchange, params, results):
        if rank == 0 and step == 9:
            kept.update(exchange.stats.last.as_dict())

    train(2, 10, sparsity=0.99, momentum=0.9, on_step=look)
    ks = [entries_to_send(int(np.prod(s)), 0.01) for n, s in SHAPES.items() if len(s) > 1 and np.prod(s) >= 64]
    elements = sum(int(np.prod(s)) for n, s in SHAPES.items() if len(s) > 1 and np.prod(s) >= 64)
    assert kept["density"] == pytest.approx(sum(ks) / elements)


def test_loss_scale_must_be_positive_and_finite():
    specs = parameters()

    def rank(transport):
        exchange = make_exchange(transport, loss_scale=lambda: 0.0 if transport.rank == 1 else 1.0)
        run_step(exchange, [gradient(0, 0, i, p.numel) for i, p in enumerate(specs)])

    errors = errors_of(2, rank)
    assert all(isinstance(e, ConfigError) and "loss_scale" in str(e) for e in errors), errors
