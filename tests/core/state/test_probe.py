"""What is seen of a residual: figures beside a naive count of every entry, and training that stays as it is."""

import numpy as np
import pytest
from contract_tools import CASES as COMPRESSORS
from contract_tools import Case, gradients, make_exchange
from exchange_tools import gradient, parameters, run_step
from exchange_tools import make_exchange as make_plain
from host_runtime import HostRuntime, compiler

from dgc.core.kernels.gpu.backend import DeviceKernels
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.probe import FIGURES, Probe, TensorFigures
from dgc.transport.local import run_ranks

STEPS = 9


class Seen:
    """Looks at some steps and keeps what it saw."""

    def __init__(self, every=1):
        self.every, self.is_off, self.error = every, False, None
        self.taken, self.left_out, self.reminded = {}, {}, 0

    def wants(self, step):
        return step % self.every == 0

    def take(self, inside):
        assert inside.step not in self.taken
        self.taken[inside.step] = {name: f.as_dict() for name, f in inside.figures.items()}
        self.left_out[inside.step] = dict(inside.left_out)

    def fail(self, error):
        self.error, self.is_off = error, True

    def remind(self):
        self.reminded += 1


def grads_of(step, rank):
    return [gradient(step, rank, i, p.numel) for i, p in enumerate(parameters())]


class Naive:
    """The same, entry by entry: v is added up by hand, and what left it was sent."""

    def __init__(self, exchange):
        self.names = {p.name: i for i, p in enumerate(exchange.layout.parameters) if exchange.layout.is_sparsified(i)}
        self.v = {name: exchange.state.residual(i).copy() for name, i in self.names.items()}

    def step(self, exchange, given, whole=False):
        found = {}
        for name, i in self.names.items():
            before = self.v[name] + given[i]
            after = exchange.state.residual(i).copy()
            sent = np.ones(before.size, bool) if whole else before != after
            found[name] = {
                "residual_norm": np.linalg.norm(after.astype(float)),
                "sent_share": 1 - np.sum(after.astype(float) ** 2) / np.sum(before.astype(float) ** 2),
                "density": sent.mean(),
            }
            self.v[name] = after
        return found


def same_figures(found, expected):
    assert found.keys() == expected.keys()
    for name, figures in expected.items():
        assert found[name] == pytest.approx(figures, rel=1e-6, abs=1e-9), name


EXACT = [
    Case("dgc", {"sparsity": 0.9, "values": "float32"}),
    Case("dgc", {"sparsity": 0.9, "values": "float16"}),
    Case("dgc", {"sparsity": 0.9, "values": "float32", "bucket_bytes": 2048}),
    Case("dgc", {"sparsity": 0.5, "values": "float32"}),
    Case("dgc", {"sparsity": 0.0, "values": "float32"}),
    Case("topk", {"threshold": "global", "sparsity": 0.9, "values": "float32"}),
    Case("strom", {"threshold": 0.05, "max_density": 0.2}),
    Case("dryden", {"sparsity": 0.8}),
    Case("onebit"),
]


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_figures_are_those_of_a_count_by_hand(case):
    def one_rank(transport):
        exchange, seen = make_exchange(transport, case), Seen()
        exchange.probe = Probe(exchange.layout, seen)
        naive, expected = Naive(exchange), {}
        for step in range(STEPS):
            given = gradients(step, transport.rank)
            for i in naive.names.values():
                given[i][:3] = 0  # never has anything to send
            run_step(exchange, [g.copy() for g in given])
            expected[step] = naive.step(exchange, given, whole=not case.row.sends_entries)
        exchange.close()
        assert seen.error is None
        for step in range(STEPS):
            same_figures(seen.taken[step], expected[step])
            assert all("sent dense" in why for why in seen.left_out[step].values())
        assert set(seen.left_out[0]) | set(seen.taken[0]) == {p.name for p in exchange.layout.parameters}
        return seen.taken

    first, second = run_ranks(2, one_rank)
    assert (first == second) is (case.options.get("sparsity") == 0.0)  # a rank's own


@pytest.mark.parametrize("case", COMPRESSORS, ids=str)
def test_training_has_the_same_bits(case):
    """With every compressor; those without a residual say so."""

    def one_rank(transport, every):
        exchange, seen = make_exchange(transport, case), Seen(every or 1)
        if every:
            exchange.probe = Probe(exchange.layout, seen)
        results = [run_step(exchange, gradients(step, transport.rank))[1] for step in range(STEPS)]
        saved = exchange.state_dict()["parameters"]
        state = {f"{n}.{k}": a.tobytes() for n, entry in saved.items() for k, a in entry.items()}
        exchange.close()
        assert seen.error is None
        if every and not case.row.error_feedback:
            assert seen.taken[0] == {}
            assert case.name in seen.left_out[0]["fc.weight"]
        elif every:
            assert seen.taken[0].keys() == {"conv.weight", "fc.weight", "head.weight"}
        return state, [[r.tobytes() for r in each] for each in results]

    without = run_ranks(2, lambda t: one_rank(t, 0), timeout=300)
    assert run_ranks(2, lambda t: one_rank(t, 1), timeout=300) == without
    assert run_ranks(2, lambda t: one_rank(t, 3), timeout=300) == without


def watched(transport, **options):
    default = {} if "algorithm" in options else {"sparsity": 0.9}
    exchange, seen = make_plain(transport, **default, **options), Seen()
    exchange.probe = Probe(exchange.layout, seen)
    return exchange, seen


def test_dense_steps_have_nothing_to_show():
    def one_rank(transport):
        exchange, seen = watched(transport, rampup_begin_step=3)
        for step in range(6):
            run_step(exchange, grads_of(step, transport.rank))
        exchange.close()
        assert [bool(seen.taken[step]) for step in range(6)] == [False] * 3 + [True] * 3
        assert "dense" in seen.left_out[2]["fc.weight"]

    run_ranks(2, one_rank)


def test_an_undecided_step_shows_what_an_applied_one_does():
    """It is probed before anybody knows what becomes of it."""

    def one_rank(transport):
        found = []
        for awaits in (False, True):
            exchange, seen = watched(transport)
            exchange.awaits_update = awaits
            for step in range(3):
                run_step(exchange, grads_of(step, transport.rank))
                assert exchange.latest.undecided is awaits
            exchange.close()
            found.append(seen.taken)
        assert found[0] == found[1]

    run_ranks(2, one_rank)


def test_a_refused_step_is_not_looked_at():
    def one_rank(transport):
        exchange, seen = watched(transport)
        exchange.loss_scale = lambda: 1.0
        for step in range(3):
            given = grads_of(step, transport.rank)
            given[2][5] = np.inf if step == 1 else 0
            assert run_step(exchange, given)[0] == (step == 1)
        exchange.close()
        assert list(seen.taken) == [0, 1]

    run_ranks(2, one_rank)


def test_who_cannot_look_goes_on_alone():
    """One rank's fails, and every rank trains on."""

    def one_rank(transport):
        exchange, seen = watched(transport)
        for step in range(4):
            if step == 1 and transport.rank == 1:
                exchange.probe._name = None
            _, results = run_step(exchange, grads_of(step, transport.rank))
        exchange.close()
        if transport.rank == 1:
            assert isinstance(seen.error, TypeError)
            assert seen.reminded == 2
        assert len(seen.taken) == (1 if transport.rank else 4)
        return [r.tobytes() for r in results]

    first, second = run_ranks(2, one_rank)
    assert first == second


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) for the kernels' text")
@pytest.mark.parametrize(
    "options", [{"values": "float32"}, {"values": "int8"}, {"algorithm": "onebit"}, {"algorithm": "qsgd"}], ids=str
)
def test_a_device_shows_what_the_host_does(options):
    """Of codecs that the device writes itself, of others, and of all elements."""

    def one_rank(transport):
        found = []
        for kernels in (ReferenceKernels(), DeviceKernels(HostRuntime(seed=3))):
            exchange, seen = watched(transport, kernels=kernels, **options)
            alive = []  # the device reads them later
            for step in range(4):
                given = grads_of(step, transport.rank)
                alive += [given, run_step(exchange, given)]
            exchange.close()
            assert seen.error is None
            found.append(seen.taken)
        for step, taken in found[0].items():
            same_figures(found[1][step], taken)

    run_ranks(2, one_rank)


def test_tensors_together():
    parts = [TensorFigures(10, 2, 4.0, 1.0), TensorFigures(30, 0, 0.0, 0.0), TensorFigures()]
    whole = TensorFigures.together(parts)
    assert whole.as_dict() == {
        "residual_norm": 1.0,
        "sent_share": 0.75,
        "density": 0.05,
    }
    assert list(whole.as_dict()) == list(FIGURES)
    assert TensorFigures().as_dict() == {"residual_norm": 0.0, "density": 0.0}
