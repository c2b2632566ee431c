"""Compressors made of compressors: by size, by name, by step."""

import functools

import numpy as np
import pytest
from contract_tools import SHAPES, Case, gradients, make_exchange, resumed, same_results, specs, train
from exchange_tools import run_step

from dgc.adapter.compressor import CompressorBase
from dgc.core.exchange.exchange import Exchange
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.layout import make_layout
from dgc.errors import ConfigError, DGCError
from dgc.transport.local import run_ranks


def member(name, **options):
    return CompressorBase(options, name)


def wrapper(kind, members, **options):
    return CompressorBase({"min_numel": 64, **options}, kind, members)


def wrapped(kind, members, **options):
    """For ``train``: an exchange with a wrapper."""

    def make(transport, case, *, shapes, dtype, **_):
        config = wrapper(kind, members, **options).config
        return Exchange(make_layout(specs(shapes, dtype), config), config, transport, ReferenceKernels())

    return make


def run(kind, members, steps=4, ranks=2, on_step=None, **options):
    return train(ranks, steps, None, exchange_of=wrapped(kind, members, **options), on_step=on_step)


def same(a, b):
    np.testing.assert_array_equal(a, b)


NAMES = list(SHAPES)
CONV, FC, HEAD = (NAMES.index(n) for n in ("conv.weight", "fc.weight", "head.weight"))


def test_by_name_gives_each_tensor_what_its_own_compressor_would():
    runs = run("by_name", {"conv*": member("qsgd", bits=8), "fc*": member("topk", sparsity=0.9)})
    qsgd, topk = train(2, 4, Case("qsgd", {"bits": 8})), train(2, 4, Case("topk", {"sparsity": 0.9}))
    for step in range(4):
        same(runs[0][0][step][CONV], qsgd[0][0][step][CONV])
        same(runs[0][0][step][FC], topk[0][0][step][FC])
        # No pattern fits: dense.
        mean = (gradients(step, 0)[HEAD] + gradients(step, 1)[HEAD]) / np.float32(2)
        same(runs[0][0][step][HEAD], mean)
        for a, b in zip(runs[0][0][step], runs[1][0][step], strict=True):
            same(a, b)
    assert {b.part for b in runs[0][1].layout.buckets} == {0, 1}


def test_by_size_takes_the_largest_key_that_fits():
    runs = run("by_size", {0: None, 200: member("terngrad"), 1000: member("dryden", sparsity=0.9)})
    terngrad, dryden = train(2, 4, Case("terngrad")), train(2, 4, Case("dryden", {"sparsity": 0.9}))
    for step in range(4):
        same(runs[0][0][step][CONV], terngrad[0][0][step][CONV])
        same(runs[0][0][step][FC], dryden[0][0][step][FC])
        same(runs[0][0][step][HEAD], (gradients(step, 0)[HEAD] + gradients(step, 1)[HEAD]) / np.float32(2))


def test_by_step_changes_over_and_hands_the_residual_on():
    members = {0: None, 1: member("strom", max_density=0.05), 3: member("topk", sparsity=0.9)}
    seen = {}

    def keep(rank, step, exchange, given, got, before):
        seen[rank, step] = (given, got, before, [exchange.state.residual(i).copy() for i in range(len(SHAPES))])

    runs = run("by_step", members, steps=6, on_step=keep)
    assert runs[0][1].schedule.begin == 1
    for i in (CONV, FC, HEAD):
        same(runs[0][0][0][i], (gradients(0, 0)[i] + gradients(0, 1)[i]) / np.float32(2))
        for step in range(1, 6):
            old = sum(seen[r, step][2][i][1].astype(np.float64) + seen[r, step][0][i] for r in range(2))
            new = sum(seen[r, step][3][i].astype(np.float64) for r in range(2)) + 2.0 * runs[0][0][step][i]
            np.testing.assert_allclose(new, old, atol=1e-5)
    strom_values = np.unique(np.abs(runs[0][0][2][FC]))
    assert set(np.round(strom_values * 1000).tolist()) <= {0, 5, 10}
    assert len(np.unique(np.abs(runs[0][0][3][FC]))) > 10


def test_by_step_flushes_the_residual_into_an_unbiased_compressor():
    runs = run("by_step", {0: member("topk", sparsity=0.9), 2: member("qsgd", bits=8)}, steps=3)
    for _, exchange in runs:
        assert not any(exchange.state.residual(i).any() for i in (CONV, FC))
    left = 0
    check = run("by_step", {0: member("topk", sparsity=0.9), 2: member("qsgd", bits=8)}, steps=2)
    for _, exchange in check:
        left = left + exchange.state.residual(FC).astype(np.float64)
    expected = (left + gradients(2, 0)[FC] + gradients(2, 1)[FC]) / 2
    error = np.linalg.norm(runs[0][0][2][FC] - expected) / np.linalg.norm(expected)
    assert error < 0.1


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        ("by_name", {"conv*": member("qsgd"), "*": member("topk", threshold="global", sparsity=0.9)}),
        ("by_size", {0: member("onebit"), 1000: member("adacomp")}),
        ("by_step", {0: member("qsgd"), 3: member("topk", sparsity=0.9)}),
    ],
    ids=["by_name", "by_size", "by_step"],
)
def test_a_saved_state_continues(kind, members):
    make = functools.partial(wrapped(kind, members), case=None, shapes=None, dtype="float32")
    for (expected, _), found in zip(run(kind, members, steps=6), resumed(make, 6, (2, 3, 4)), strict=True):
        same_results(expected, found)


def test_each_member_has_its_own_schedule_and_momentum_is_shared():
    members = {"conv*": member("topk", sparsity=[0.5, 0.9], rampup_step=4), "*": member("dgc", sparsity=0.99)}
    runs = run("by_name", members, steps=5, momentum=0.9, ranks=1)
    sent = [np.count_nonzero(r[CONV]) for r in runs[0][0]]
    assert sent == [144, 144, 28, 28, 28]
    assert np.count_nonzero(runs[0][0][0][FC]) == 13
    assert runs[0][1].state.momentum_buffer(CONV).any()


def test_an_error_and_a_refusal_reach_all_ranks():
    members = {"conv*": member("terngrad"), "*": member("qsgd", coding="elias", bits=2)}

    def one_rank(transport):
        exchange = wrapped("by_name", members)(transport, None, shapes=None, dtype="float32")
        given = gradients(0, transport.rank)
        if transport.rank == 1:
            given[FC][3] = np.nan
        refused, got = run_step(exchange, given)
        assert refused
        assert np.isnan(got[FC]).all()
        given = gradients(0, transport.rank)
        if transport.rank == 0:
            given[-1] = np.ones(2, np.float32)
        with pytest.raises(DGCError, match="has 2 elements"):
            run_step(exchange, given)
        exchange.close()

    run_ranks(2, one_rank)


def test_a_change_of_compressor_forgets_what_the_last_one_remembered():
    """The threshold of the first would let half of the entries through, up to the room in a message."""
    members = {
        0: member("topk", threshold="global", sparsity=0.5),
        2: member("topk", threshold="global", sparsity=0.98, headroom=5.0),
    }
    densities = []
    run("by_step", members, steps=3, ranks=1, on_step=lambda *a: densities.append(a[2].stats.last.density))
    assert densities[2] <= 0.025


@pytest.mark.parametrize("kind", ["by_name", "by_step"])
def test_an_error_before_the_message_leaves_reaches_all_ranks_in_any_step(kind):
    keys = ("conv*", "*") if kind == "by_name" else (0, 1)
    members = {keys[0]: member("terngrad"), keys[1]: member("topk", sparsity=0.9)}

    def broken(*args):
        raise MemoryError("no memory left")

    def one_rank(transport):
        exchange = wrapped(kind, members)(transport, None, shapes=None, dtype="float32")
        for step in range(2):
            run_step(exchange, gradients(step, transport.rank))
        if transport.rank == 1:
            exchange._pipeline._clipping.fill_in = broken
        with pytest.raises(DGCError, match="no memory left"):
            run_step(exchange, gradients(2, transport.rank))
        exchange.close()

    run_ranks(2, one_rank)


@pytest.mark.parametrize("kind", ["by_name", "plain"])
def test_an_error_after_the_message_left_is_not_sent_again(kind):
    def one_rank(transport):
        if kind == "plain":
            exchange = make_exchange(transport, Case("qsgd"))
            algorithm = exchange._buckets[-1].encoder._algorithm
        else:
            make = wrapped("by_name", {"*": member("qsgd")})
            exchange = make(transport, None, shapes=None, dtype="float32")
            algorithm = exchange._buckets[-1].encoder._algorithm
        if transport.rank == 0:
            refused, _ = run_step(exchange, gradients(0, 0))
            assert not refused
        else:

            def broken(*args):
                raise MemoryError("no memory left")

            algorithm.decode = broken
            with pytest.raises(DGCError, match="no memory left"):
                run_step(exchange, gradients(0, 1))
        exchange.close()

    run_ranks(2, one_rank)


BAD = [
    ("by_size", {}, "the compressor of tensors from so many elements"),
    ("by_size", {10: member("topk")}, "give a member for 0"),
    ("by_size", {-1: member("topk")}, "the key -1"),
    ("by_size", {"a": member("topk")}, "the key 'a'"),
    ("by_name", {3: member("topk")}, "the key 3"),
    ("by_name", {"*": "topk"}, "give a compressor such as"),
    ("by_name", {"*": member("topk", min_numel=3)}, "'min_numel' concerns all tensors"),
    ("by_name", {"*": member("topk", momentum=0.9)}, "'momentum' concerns all tensors"),
    ("by_step", {0: None}, "the step at which a compressor follows"),
    ("by_step", {0: member("topk"), 5: None}, "cannot go back"),
]


@pytest.mark.parametrize(("kind", "members", "message"), BAD, ids=[b[2] for b in BAD])
def test_members_that_cannot_be(kind, members, message):
    with pytest.raises(ConfigError, match=message):
        wrapper(kind, members)


def test_options_of_members_are_not_the_wrappers():
    with pytest.raises(TypeError, match=r"by_size got an unknown option 'bits'; valid options: .*min_numel"):
        wrapper("by_size", {0: member("qsgd")}, bits=4)
    with pytest.raises(ConfigError, match="give a compressor such as"):
        wrapper("by_size", {0: wrapper("by_size", {0: member("qsgd")})})
