"""The shared half of an engine, over ranks that are threads."""

import warnings

import pytest
from fakes import FakeEngine

from dgc.core.compressors import make_config
from dgc.transport.local import run_ranks

CONFIG = make_config({"momentum": 0.5, "sparsity": 0.9, "min_numel": 64, "rampup_begin_step": 0})


@pytest.mark.parametrize("names", [(), ("a", "b")], ids=len)
def test_describe_is_the_same_before_and_after_the_first_step(names):
    def one_rank(transport):
        engine = FakeEngine(transport, CONFIG, names)
        found = engine.describe()
        engine.close()
        return found

    whole = run_ranks(2, lambda t: FakeEngine(t, CONFIG).describe())[0]
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
        engine = FakeEngine(transport, config)
        told = engine.describe()["density"]
        engine.close()
        return told

    assert run_ranks(2, one_rank) == [0.001] * 2


def test_one_rank_warns_once_in_a_training_of_more_steps_than_the_option_says():
    def one_rank(transport):
        engine, told = FakeEngine(transport, make_config({"momentum": 0.5, "steps": 3})), []
        for number in range(6):
            engine.step(number)
            told.append(len(seen))
        engine.close()
        return told

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        told, _ = run_ranks(2, one_rank)
    assert told == [0, 0, 0, 1, 1, 1]
    assert "more steps than Compression.dgc(steps=3) says" in str(seen[0].message)
    assert "on another number of ranks, that is the number of steps made before plus" in str(seen[0].message)


@pytest.mark.parametrize("waits", [False, True])
def test_the_transport_is_left_alone_while_a_thread_waits_in_it(waits):
    def one_rank(transport):
        engine = FakeEngine(transport, CONFIG)
        closed = []
        engine.transport.close = lambda: closed.append(True)
        own = engine._exchange.close
        engine._exchange.close = lambda: own() and not waits
        engine.close()
        return len(closed)  # the end of a rank closes it, too

    assert run_ranks(2, one_rank) == [0 if waits else 1] * 2


@pytest.mark.parametrize("names", [(), ("a", "b")], ids=["opened later", "opened at once"])
def test_a_dropped_engine_ends_its_thread_and_closes_its_transport(names):
    def one_rank(transport):
        engine, closed = FakeEngine(transport, CONFIG, names), []
        if not names:
            engine.open()
        exchange, own = engine._exchange, engine._exchange.close
        exchange.close = lambda: closed.append("thread") or own()
        transport.close = lambda: closed.append("transport")
        del engine
        return list(closed)  # the end of a rank closes the transport, too

    assert run_ranks(2, one_rank) == [["thread", "transport"]] * 2


def test_who_asks_is_told_of_each_step_once_and_no_more_after_an_error(caplog):
    def one_rank(transport):
        engine, told, failed = FakeEngine(transport, CONFIG), [], []

        def fails(figures):
            failed.append(figures["step"])
            if figures["step"] == 1:
                raise OSError("no space left on device")

        engine.observers += [fails, told.append]
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
