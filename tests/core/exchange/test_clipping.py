"""Clipping before compression, by one norm of all gradients; for each tensor by itself: test_exchange.py."""

import time

import numpy as np
from exchange_tools import SHAPES, gradients, on_ranks


def test_global_clipping_scales_every_gradient_by_one_norm_from_the_first_step():
    def step(exchange, rank):
        assert len(exchange.layout.buckets) > 1
        grads = gradients(0, rank)
        results = [np.empty_like(g) for g in grads]
        for i in reversed(range(len(grads))):
            exchange.submit(i, grads[i], results[i])
            # A bucket that did not wait for all gradients would be on its way by now, with too small a norm.
            time.sleep(0.02)
        exchange.finish()
        return grads, results

    options = {"local_grad_clip_norm": 0.25, "clip_scope": "global", "rampup_begin_step": 5, "bucket_bytes": 2048}
    out = on_ranks(2, step, **options)
    expected = [0.0] * len(SHAPES)
    for grads, _ in out:
        norm = np.sqrt(sum(np.dot(g, g) for g in grads))
        assert norm > 0.25 * 2**0.5
        for i, g in enumerate(grads):
            expected[i] = expected[i] + g * (0.25 * 2**0.5 / norm) / 2
    for result, e in zip(out[0][1], expected, strict=True):
        np.testing.assert_allclose(result, e, rtol=1e-5, atol=1e-8)
