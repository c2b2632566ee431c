"""A step that was exchanged and not applied: what was sent in it returns."""

import numpy as np
import pytest
from contract_tools import CASES as COMPRESSORS
from contract_tools import make_exchange as make_compressor_exchange
from contract_tools import specs as contract_specs
from exchange_tools import REPORTED, gradient, make_exchange, parameters, run_step
from fake_device import fake_kernels, host

from dgc.core.exchange.exchange import Stage
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.kernels.reference import ReferenceKernels
from dgc.transport.local import run_ranks

OPTIONS = {
    "plain": {"sparsity": 0.9},
    "momentum": {"sparsity": 0.9, "momentum": 0.9},
    "no masking": {"sparsity": 0.9, "momentum": 0.9, "momentum_masking": False},
    "dense sum": {"sparsity": 0.5, "momentum": 0.9},
    "everything": {"sparsity": 0.0, "momentum": 0.9},
    "several buckets": {"sparsity": 0.9, "momentum": 0.9, "bucket_bytes": 2048},
    "float16": {"sparsity": 0.9, "momentum": 0.9, "values": "float16"},
    "few bits": {"sparsity": 0.9, "momentum": 0.9, "indices": "elias_fano", "values": "int2", "small": "int3"},
    "coded": {"sparsity": 0.9, "momentum": 0.9, "small": "int8", "bucket_bytes": 2048},
}


def grads_of(step, rank, specs):
    return [gradient(step, rank, i, p.numel, p.dtype) for i, p in enumerate(specs)]


def everything(exchange):
    """The state as comparable bytes."""
    saved = exchange.state_dict()
    arrays = {f"{n}.{k}": a.tobytes() for n, e in saved["parameters"].items() for k, a in e.items()}
    return {**arrays, "step": saved["step"]}


def conserving(make, specs, pattern=(False, True, False, True, True, False)):
    """Sums by parameter of gradients, of applied results, and of residuals of all ranks."""

    def one_rank(transport):
        exchange = make(transport)
        given = [np.zeros(p.numel) for p in specs]
        applied = [np.zeros(p.numel) for p in specs]
        for step, dropped in enumerate(pattern):
            gradients = grads_of(step, transport.rank, specs)
            _, results = run_step(exchange, [g.copy() for g in gradients], options=REPORTED)
            if dropped:
                assert exchange.drop()
                assert not exchange.drop()
            else:
                exchange.applied()
            for i, (g, r) in enumerate(zip(gradients, results, strict=True)):
                given[i] += g
                applied[i] += 0 if dropped else r
        assert exchange.state.step == len(pattern)
        residuals = [host(exchange.state.residual(i)).astype(np.float64) for i in range(len(specs))]
        exchange.close()
        return given, applied, residuals

    return run_ranks(2, one_rank)


def assert_conserved(ranks, specs):
    for i, p in enumerate(specs):
        if not ranks[0][2][i].size:
            continue  # is sent dense: nothing remembers it
        given = sum(rank[0][i] for rank in ranks)
        kept = sum(rank[2][i] for rank in ranks)
        np.testing.assert_array_equal(ranks[0][1][i], ranks[1][1][i])
        np.testing.assert_allclose(kept + 2 * ranks[0][1][i], given, atol=2e-4, err_msg=p.name)


@pytest.mark.parametrize("kernels", [ReferenceKernels, NumbaKernels, fake_kernels])
@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_is_lost_in_a_step_that_nobody_applied(name, kernels):
    options = {**OPTIONS[name], "momentum": 0.0}
    specs = parameters()
    assert_conserved(conserving(lambda t: make_exchange(t, kernels=kernels(), **options), specs), specs)


FEEDBACK = [case for case in COMPRESSORS if case.row.error_feedback]


@pytest.mark.parametrize("case", FEEDBACK, ids=str)
def test_nothing_is_lost_by_any_compressor_with_a_residual(case):
    specs = contract_specs()
    assert_conserved(conserving(lambda t: make_compressor_exchange(t, case), specs), specs)


@pytest.mark.parametrize("name", ["momentum", "no masking", "several buckets", "float16"])
def test_the_sent_entries_return_as_in_a_refused_step(name):
    """u and v are what they would be had nothing been sent: velocity and gradient are in them."""

    def one_rank(transport):
        specs = parameters()
        exchange = make_exchange(transport, **OPTIONS[name])
        run_step(exchange, grads_of(0, transport.rank, specs))
        before = exchange.state_dict()["parameters"]
        given = grads_of(1, transport.rank, specs)
        run_step(exchange, [g.copy() for g in given], options=REPORTED)
        assert exchange.drop()
        after = exchange.state_dict()["parameters"]
        exchange.close()
        for p, g in zip(specs, given, strict=True):
            if "v" in before[p.name]:
                u = np.float32(0.9) * before[p.name]["u"] + g
                np.testing.assert_allclose(after[p.name]["u"], u, rtol=1e-6, atol=1e-7)
                np.testing.assert_allclose(after[p.name]["v"], before[p.name]["v"] + u, rtol=1e-6, atol=1e-7)

    run_ranks(2, one_rank)


# -- between the exchange and the update ---------------------------------------------------------------------------


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("case", COMPRESSORS, ids=str)
def test_an_undecided_step_is_saved_as_an_applied_one_and_can_still_be_dropped(case, dropped):
    def one_rank(transport):
        specs = contract_specs()
        exchange = make_compressor_exchange(transport, case)
        run_step(exchange, grads_of(0, transport.rank, specs), options=REPORTED)
        exchange.applied()
        run_step(exchange, grads_of(1, transport.rank, specs), options=REPORTED)
        uncommitted = [b.v.tobytes() for b in exchange.state.buckets]
        saved, norm = everything(exchange), exchange.residual_norm()
        assert exchange.latest.stage is Stage.EXCHANGED
        assert [b.v.tobytes() for b in exchange.state.buckets] == uncommitted
        if dropped:
            assert exchange.drop()
            assert [b.v.tobytes() for b in exchange.state.buckets] == uncommitted
        else:
            exchange.applied()
            assert everything(exchange) == saved
            assert exchange.state.residual_norm() == norm
            changed = [b.v.tobytes() for b in exchange.state.buckets] != uncommitted
            assert changed == case.row.error_feedback
        exchange.close()

    run_ranks(2, one_rank)
