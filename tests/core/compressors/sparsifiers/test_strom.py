"""Strom's threshold against its paper's formula, written down once more and naively."""

import numpy as np
import pytest
from contract_tools import Alone, Case, train

from dgc.errors import WireError


def test_strom_sends_the_threshold_and_its_sign_only():
    alone = Alone(Case("strom", {"threshold": 0.5, "max_density": 1.0}), {"w": (4, 4)})
    x = alone.flat({"w": [0.5, 0.51, -0.5, -0.51, 7, -7, 0, 0.1, *[0] * 8]})
    decoded, count, used = alone.sent(x)
    np.testing.assert_array_equal(decoded.positions, [1, 3, 4, 5])
    np.testing.assert_array_equal(decoded.values, np.float32([0.5, -0.5, 0.5, -0.5]))
    assert (count, used) == (4, 16)
    message, _, _ = alone.encode(x)
    np.testing.assert_array_equal(message[:16].view("<u4"), [1 << 1 | 1, 3 << 1, 4 << 1 | 1, 5 << 1])


def test_strom_sends_the_largest_first_when_there_are_too_many():
    alone = Alone(Case("strom", {"threshold": 0.1, "max_density": 0.25}), {"w": (4, 4)})
    x = alone.flat({"w": np.linspace(1, 2, 16) * np.tile([1, -1], 8)})
    decoded, count, _ = alone.sent(x)
    assert count == 4
    np.testing.assert_array_equal(decoded.positions, [12, 13, 14, 15])


@pytest.mark.parametrize(
    "positions",
    [[20], [3, 3], [5, 4], [32 + 25], [1000], [2**31 - 1]],
    ids=["padding", "twice", "descending", "padding at the end", "beyond", "far beyond"],
)
def test_positions_that_no_sender_writes_are_refused(positions):
    alone = Alone(Case("strom", {"max_density": 1.0}), {"b": (5, 5), "a": (4, 5)})  # 20 and 25 of 32 elements each
    message = np.zeros(alone.algorithm.max_bytes(alone.spec), np.uint8)
    words = (np.array(positions, np.uint32) << np.uint32(1)).astype("<u4")
    message[: words.nbytes] = words.view(np.uint8)
    with pytest.raises(WireError, match=r"ascending|between tensors"):
        alone.algorithm.decode(message, len(positions), alone.spec)
    message[:4] = np.array([19 << 1], "<u4").view(np.uint8)
    assert alone.algorithm.decode(message, 1, alone.spec).positions == [19]


def test_what_is_left_over_in_a_message_is_zero():
    """Nothing of the step before, or of other memory, travels in the room that a message does not need."""
    from contract_tools import gradients, make_exchange
    from exchange_tools import run_step

    from dgc.core.header import HEADER_BYTES
    from dgc.transport.local import run_ranks

    def one_rank(transport):
        exchange = make_exchange(transport, Case("strom", {"threshold": 0.2, "max_density": 0.5}))
        run_step(exchange, gradients(0, transport.rank))
        count = round(exchange.stats.last.density * exchange.layout.sparse_numel)
        bucket = exchange._buckets[0]
        spec = bucket.encoder.plan_at(1.0).payload_bytes
        tails = [bucket._sender._gathered[0, HEADER_BYTES + 4 * count : HEADER_BYTES + spec].copy()]
        run_step(exchange, [np.zeros_like(g) for g in gradients(1, transport.rank)])
        count = round(exchange.stats.last.density * exchange.layout.sparse_numel)
        tails.append(bucket._sender._gathered[0, HEADER_BYTES + 4 * count : HEADER_BYTES + spec].copy())
        exchange.close()
        return tails

    for tail in run_ranks(1, one_rank)[0]:
        assert tail.size > 0
        assert not tail.any()


def test_strom_drains_a_large_residual_step_by_step():
    runs = train(1, 3, Case("strom", {"threshold": 0.01, "max_density": 1.0}), shapes={"w": (64, 64)})
    _, exchange = runs[0]
    assert np.abs(exchange.state.residual(0)).max() > 0.01
