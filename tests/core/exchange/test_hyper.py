"""What the exchange reads from its caller, and what it counts."""

import pytest
from exchange_tools import errors_of, gradient, make_exchange, parameters, run_step

from dgc.core.exchange.step import Hyper
from dgc.errors import ConfigError


@pytest.mark.parametrize("later", [False, True])
def test_loss_scale_must_be_positive_and_finite(later):
    specs = parameters()

    def rank(transport):
        scale = 0.0 if transport.rank == 1 else 1.0
        exchange = make_exchange(transport, loss_scale=lambda: (lambda: scale) if later else scale)
        run_step(exchange, [gradient(0, 0, i, p.numel) for i, p in enumerate(specs)])

    errors = errors_of(2, rank)
    assert all(isinstance(e, ConfigError) and "loss_scale" in str(e) for e in errors), errors


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
