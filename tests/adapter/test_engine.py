"""The shared half of an engine, over ranks that are threads."""

import gc
import threading
import time

import numpy as np
import pytest
from fakes import FakeEngine

from dgc.adapter.engine import EMPTY, is_empty
from dgc.core.compressors import make_config
from dgc.errors import LayoutError, RemoteError
from dgc.transport.local import run_ranks

CONFIG = make_config({"momentum": 0.5, "sparsity": 0.9, "min_numel": 64, "rampup_begin_step": 0})

GROUPS = [(), (("a", "b"),), (("a",), ("b",))]


@pytest.mark.parametrize("names", GROUPS, ids=len)
def test_describe_is_the_same_for_any_number_of_exchanges(names):
    def one_rank(transport):
        engine = FakeEngine(transport, CONFIG, names)
        found = engine.describe()
        engine.close()
        return found

    whole = run_ranks(2, lambda t: FakeEngine(t, CONFIG, (("a", "b"),)).describe())[0]
    for found in run_ranks(2, one_rank):
        assert list(found) == list(whole)
        changing = {"buckets", "kernels", "exchange"}
        assert {k: v for k, v in found.items() if k not in changing} == {
            k: v for k, v in whole.items() if k not in changing
        }
        assert found["buckets"] >= 1


def test_a_density_is_a_number_that_a_person_would_write():
    config = make_config({"momentum": 0.5, "sparsity": 0.999})

    def one_rank(transport):
        engine = FakeEngine(transport, config, GROUPS[1])
        told = engine.describe()["density"]
        engine.close()
        return told

    assert run_ranks(2, one_rank) == [0.001] * 2


def test_counters_and_norms_are_those_of_all_exchanges():
    def one_rank(transport):
        one, two = FakeEngine(transport, CONFIG, GROUPS[1]), FakeEngine(transport, CONFIG, GROUPS[2])
        for engine in (one, two):
            engine.step()
        assert two.stats.steps == one.stats.steps == 1
        assert two.stats.total.dense_bytes == one.stats.total.dense_bytes
        norms = [e.state.residual_norm() for e in two._exchanges]
        assert two.residual_norm() == pytest.approx(np.hypot(*norms))
        assert min(norms) > 0

    run_ranks(2, one_rank)


def test_a_state_of_all_exchanges_is_one_and_an_empty_one_resets():
    def one_rank(transport):
        engine = FakeEngine(transport, CONFIG)
        none = FakeEngine(transport, CONFIG, ())
        assert is_empty(none.state_dict())
        none.close(keep_transport=True)
        engine.step()
        saved, norm = engine.state_dict(), engine.residual_norm()
        assert list(saved) == ["format", "step", "parameters", "rank", "size", "op", "count"]
        assert set(saved["parameters"]) == {"a", "b"}
        assert not is_empty(saved)
        for empty in (EMPTY, {}):
            engine.step(1)
            engine.load_state_dict(dict(empty))
            assert engine.residual_norm() == 0
            assert engine.state_dict()["step"] == 0
        assert engine.cleared == 2
        engine.load_state_dict(saved)
        assert engine.residual_norm() == norm
        assert engine.cleared == 2

    run_ranks(2, one_rank)


def test_errors_of_a_construction_reach_all_ranks():
    def one_rank(transport):
        with pytest.raises(ValueError if transport.rank else RemoteError, match="no memory"):
            FakeEngine(transport, CONFIG, bad=transport.rank == 1)
        with pytest.raises(LayoutError, match=r"tensors differ between ranks: 'a'.*Give every rank the same tensors"):
            FakeEngine(transport, CONFIG, numel=2048 + 64 * transport.rank)

    run_ranks(2, one_rank)


def test_an_engine_that_is_dropped_ends_its_threads():
    before = set(threading.enumerate())
    seen = []

    def one_rank(transport):
        engine = FakeEngine(transport, CONFIG)
        engine.step()
        seen.append(set(threading.enumerate()))

    def left():
        return set(threading.enumerate()) - before

    run_ranks(2, one_rank)
    assert len(seen[-1] - before) > 2, "the ranks themselves are threads"
    gc.collect()
    deadline = time.monotonic() + 300
    while left() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left()


@pytest.mark.parametrize("waits", [False, True])
def test_the_transport_is_left_alone_while_a_thread_waits_in_it(waits):
    def one_rank(transport):
        engine = FakeEngine(transport, CONFIG)
        closed = []
        engine.transport.close = lambda: closed.append(True)
        for place, exchange in enumerate(engine._exchanges):
            own = exchange.close
            exchange.close = lambda own=own, place=place: own() and not (waits and place == 0)
        engine.close()
        return len(closed)  # the end of a rank closes it, too

    assert run_ranks(2, one_rank) == [0 if waits else 1] * 2


@pytest.mark.parametrize("names", [(("a", "b"),), (("a",), ("b",))], ids=len)
def test_who_asks_is_told_of_each_step_once_and_no_more_after_an_error(names, caplog):
    def one_rank(transport):
        engine, told, failed = FakeEngine(transport, CONFIG, names), [], []

        @engine.on_step
        def fails(figures):
            failed.append(figures["step"])
            if figures["step"] == 1:
                raise OSError("no space left on device")

        engine.on_step(told.append)
        for step in range(3):
            engine.step(step)
        engine.step(3, scale=float("nan"))
        engine.step(4)
        engine.reset()
        engine.step(5)
        last = engine.stats.last.as_dict()
        engine.close()
        return told, failed, last

    for told, failed, last in run_ranks(2, one_rank):
        assert failed == [0, 1]
        assert [(f["step"], f["refused"]) for f in told] == [
            *((step, False) for step in range(3)),
            (3, True),
            (3, False),
            (0, False),
        ]
        assert {key: told[-1][key] for key in last} == last
    assert "no space left on device" in caplog.text
