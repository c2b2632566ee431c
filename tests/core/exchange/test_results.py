"""When an exchange writes results, which share the gradients' memory, and when it drops the gradients."""

import numpy as np
import pytest
from exchange_tools import gradients, on_ranks

from dgc.core.exchange import choice

WAYS = {
    "gathered": {"sparsity": 0.9},
    "dense sum": {"sparsity": 0.0},
    "owners": {"sparsity": 0.9},
    "ramp-up": {"rampup_begin_step": 5},
    "onebit": {"algorithm": "onebit"},
    "strom": {"algorithm": "strom"},
}


@pytest.mark.parametrize("way", WAYS)
def test_results_are_written_by_finish_because_autograd_may_still_read_the_gradients(way, monkeypatch):
    if way == "owners":
        monkeypatch.setattr(choice, "OWNERS_SHARE", np.inf)

    def step(exchange, rank):
        assert exchange.ways() == way or way not in ("gathered", "dense sum", "owners")
        own = gradients(0, rank)
        given = [g.copy() for g in own]
        for i, g in enumerate(given):
            exchange.submit(i, g, g)
        exchange.wait()
        for g, before in zip(given, own, strict=True):
            np.testing.assert_array_equal(g, before)
        exchange.finish()
        assert any((g != before).any() for g, before in zip(given, own, strict=True))
        assert not any(bucket.step.submissions for bucket in exchange._buckets), "the gradients' memory is kept"
        return given

    found = on_ranks(2, step, **WAYS[way])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
