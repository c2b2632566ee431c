"""Ranks that send as one: the exchange of 2 nodes of 2 ranks is that of 2 ranks with the nodes' sums, bit for bit."""

import ml_dtypes
import numpy as np
import pytest
from exchange_tools import (
    errors_of,
    gradient,
    gradients,
    on_ranks,
    paper,
    parameters,
    run_step,
    same_results,
    train,
    worst,
)

from dgc.core.kernels.reference import ReferenceKernels
from dgc.errors import ConfigError, DGCError

PAIRS = [0, 0, 2, 2]
STEPS = 8
SMALL_BUCKETS = {"bucket_bytes": 2048}


def train_nodes(nodes, of_rank, steps=STEPS, dtype="float32", **options):
    """Train on ranks of which ``nodes[rank]`` send as one; ``of_rank(step, rank, index, numel)`` are the gradients."""
    specs = parameters(None, dtype)

    def one_rank(exchange, rank):
        rng = np.random.default_rng(1)
        params = [rng.standard_normal(p.numel).astype(dtype) for p in specs]
        for step in range(steps):
            grads = [of_rank(step, rank, i, p.numel) for i, p in enumerate(specs)]
            before = [g.copy() for g in grads]
            _, results = run_step(exchange, grads, params)
            for g, b in zip(grads, before, strict=True):
                np.testing.assert_array_equal(g, b)  # they are the caller's
            for p, r in zip(params, results, strict=True):
                p -= r.dtype.type(0.1) * r
        return params, exchange.state_dict()

    return on_ranks(len(nodes) if nodes else 2, one_rank, nodes=nodes, dtype=dtype, **options)


def summed(of_rank, factor):
    """Gradients of nodes of two, from those of their ranks."""
    return lambda step, node, *place: (of_rank(step, 2 * node, *place) + of_rank(step, 2 * node + 1, *place)) * factor


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9, "sparsity": 0.9},
        {
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 1e-3,
            "sparsity": 0.9,
            "values": "float16",
            "small": "int8",
        },
        {"momentum": 0.9, "sparsity": 0.9, "local_grad_clip_norm": 0.1},
        {"momentum": 0.9, "sparsity": 0.9, "local_grad_clip_norm": 0.1, "clip_scope": "global"},
        {"momentum": 0.9, "sparsity": [0.5, 0.9], "rampup_begin_step": 2, "rampup_step": 4},
        {"momentum": 0.9, "sparsity": 0.0},
    ],
    ids="plain nesterov clipped clipped_globally warm_up dense".split(),
)
@pytest.mark.parametrize("op", ["average", "sum"])
def test_nodes_of_two_are_ranks_with_the_sums_of_two(options, op):
    node_gradient = summed(gradient, np.float32(0.5 if op == "average" else 1.0))
    found = train_nodes(PAIRS, gradient, op=op, **options, **SMALL_BUCKETS)
    expected = train_nodes(None, node_gradient, op=op, **options, **SMALL_BUCKETS)
    for rank, (params, state) in enumerate(found):
        same_results([params], expected[0][:1])
        np.testing.assert_equal(state["parameters"], expected[rank // 2][1]["parameters"])


class Eager(ReferenceKernels):
    """Would begin with a bucket while the one before it is exchanged."""

    overlaps = True

    def begin_selection(self, work, u, v, thresholds):
        selected = self.accumulate_and_select(work, u, v, thresholds)
        return lambda: selected


def test_no_bucket_is_begun_before_its_sum():
    options = {"momentum": 0.9, "sparsity": 0.9, **SMALL_BUCKETS}
    found = train_nodes(PAIRS, gradient, kernels=Eager(), **options)
    same_results(found[1][:1], train_nodes(None, summed(gradient, np.float32(0.5)), **options)[0][:1])


@pytest.mark.parametrize(("dtype", "view"), [(np.float16, np.float16), (ml_dtypes.bfloat16, np.uint16)])
def test_narrow_gradients_are_added_up_in_float32(dtype, view):
    def as_given(*place):
        return gradient(*place).astype(dtype).view(view)

    def wide(*place):
        return gradient(*place).astype(dtype).astype(np.float32)

    options = {"momentum": 0.9, "sparsity": 0.9}
    found = train_nodes(PAIRS, as_given, **options)
    same_results(found[3][:1], train_nodes(None, summed(wide, np.float32(0.5)), **options)[0][:1])


def test_float64_and_a_loss_scale():
    def doubled(step, rank, index, numel):
        return gradient(step, rank, index, numel, "float64")

    options = {"momentum": 0.9, "sparsity": 0.9, "dtype": "float64", "loss_scale": 8.0}
    found, expected = train_nodes(PAIRS, doubled, **options), train_nodes(None, summed(doubled, 0.5), **options)
    same_results(found[2][:1], expected[0][:1])


def test_nodes_of_unlike_sizes_give_every_rank_the_same_weight():
    found = train_nodes([0, 1, 1], gradient, momentum=0.9, sparsity=0.0, momentum_masking=False)
    assert worst(found[0][0], paper(3, {"momentum": 0.9, "rampup_begin_step": STEPS}, STEPS)) <= 2e-6
    for params, _ in found[1:]:
        same_results([params], found[0][:1])


def test_a_node_of_one_rank_each_is_the_flat_exchange():
    options = {"momentum": 0.9, "sparsity": 0.9}
    same_results(train_nodes([0, 1], gradient, **options)[0][:1], train(2, STEPS, **options)[0][:1])


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_rank_that_fails_is_told_to_all_ranks_of_all_nodes(failing):
    def steps(exchange, rank):
        grads = gradients(0, rank)
        run_step(exchange, grads)
        for i in reversed(range(len(grads))):
            if rank == failing and i == 2:
                exchange.fail(ConfigError("the lights are out"))
            exchange.submit(i, grads[i], np.empty_like(grads[i]))
        exchange.finish()

    errors = errors_of(4, steps, nodes=PAIRS, sparsity=0.9, **SMALL_BUCKETS)
    assert all(isinstance(e, DGCError) for e in errors)
    assert isinstance(errors[failing], ConfigError)
    for error in errors:
        assert "the lights are out" in str(error)
    others = [str(e) for r, e in enumerate(errors) if r != failing]
    assert all(f"node {failing // 2} failed in step 1: rank {failing}: the lights are out" in text for text in others)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_collect_its_gradients_leaves_nobody_in_the_sum(failing):
    def poor(step, bucket):
        raise MemoryError("no room")

    def step(exchange, rank):
        if rank == failing:
            exchange._pipeline._nodes.collect = poor
        run_step(exchange, gradients(0, rank))

    errors = errors_of(4, step, nodes=PAIRS, sparsity=0.9)
    assert all(isinstance(e, DGCError) and "MemoryError: no room" in str(e) for e in errors), errors
    assert errors[3 - failing].args[0].startswith(f"node 0 failed in step 0: rank {failing}: ")


def test_a_gradient_that_is_not_finite_refuses_the_step_of_all_and_is_told_once_a_node(recwarn):
    def steps(exchange, rank):
        grads = gradients(0, rank)
        run_step(exchange, grads)
        if rank == 2:
            grads[2][5] = np.nan
        assert run_step(exchange, grads)[0]
        assert exchange.state.step == 1

    on_ranks(4, steps, nodes=PAIRS, sparsity=0.9, momentum=0.9)
    texts = [str(w.message) for w in recwarn if "NaN, infinity" in str(w.message)]
    assert len(texts) == 2
    assert any("met by node 1 in the gradient of 'fc.weight'" in text for text in texts)
