"""Binding, and what is kept before it, without a framework."""

import gc
import weakref

import pytest
from fakes import FakeEngine, FakeHorovod, FakeSet

from dgc.adapter.compressor import CompressorBase
from dgc.core.saved import EMPTY, INACTIVE
from dgc.errors import ConfigError, LayoutError
from dgc.transport.local import run_ranks


class Compressor(CompressorBase[FakeEngine]):
    def __init__(self, ranks, size=2, **options):
        self._job = FakeHorovod(size=size, transport=ranks)
        super().__init__({"momentum": 0.5, "sparsity": 0.9, **options})
        self.undone, self.fails = 0, None

    def bind(self, process_set=None, **engine):
        def open_engine(transport):
            if self.fails:
                raise self.fails
            return FakeEngine(transport, self.config, **engine)

        def undo():
            self.undone += 1

        self._bind(process_set, open_engine, undo)


def test_nothing_remains_of_a_binding_that_failed():
    def one_rank(transport):
        closed = []
        transport.close = lambda: closed.append(True)
        compressor = Compressor(transport)
        with pytest.raises(LayoutError, match="tensors differ"):
            compressor.bind(numel=2048 + 64 * transport.rank)
        compressor.fails = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            compressor.bind()
        compressor.fails = None
        assert (compressor.undone, len(closed)) == (2, 2)
        assert compressor.engine is None
        assert not compressor.is_bound
        assert compressor.describe() == {}
        compressor.bind()
        compressor.engine.step()
        assert compressor.is_bound
        assert compressor.describe()["step"] == 1
        assert (compressor.undone, len(closed)) == (2, 2)

    run_ranks(2, one_rank)


def test_close_forgets_the_observers_so_that_their_files_are_written():
    """DDP never frees its hook, which holds the compressor."""

    def one_rank(transport):
        compressor = Compressor(transport)
        compressor.bind()
        living = weakref.ref(compressor.on_step(lambda figures: figures))
        compressor.engine.step()
        assert living() is not None
        compressor.close()
        assert living() is None

    run_ranks(2, one_rank)


def test_a_wrapper_sets_the_op_once():
    compressor = Compressor(None)
    assert (compressor.use_op(None), compressor.use_op("Sum"), compressor.use_op(None)) == ("average", "sum", "sum")
    compressor.is_bound = True
    with pytest.raises(ConfigError, match="the compressor has op=sum, the optimizer op=average"):
        compressor.use_op("average")
    with pytest.raises(ConfigError, match="the compressor has op=average, the optimizer op=sum"):
        Compressor(None, op="average").use_op("sum")


def test_a_wrapper_that_is_refused_leaves_the_op_as_it_was():
    compressor = Compressor(None)
    with pytest.raises(ConfigError, match="gradient_predivide_factor needs"):
        compressor.use_op("sum", 2.0)
    assert compressor.config.op == "average"


def test_a_transport_that_the_user_brought_stays_open():
    def one_rank(transport):
        closed = []
        transport.close = lambda: closed.append(True)
        compressor = Compressor(transport, transport=transport)
        compressor.fails = ConfigError("something")
        with pytest.raises(ConfigError, match="something"):
            compressor.bind()
        compressor.fails = None
        compressor.load_state_dict({"parameters": {"a": {}}})
        with pytest.raises(LayoutError, match="has format None"):
            compressor.bind()
        gc.collect()
        assert not closed
        compressor.reset()
        compressor.bind()
        compressor.close()
        assert closed

    run_ranks(2, one_rank)


def test_a_state_is_kept_until_there_is_an_engine():
    def one_rank(transport):
        first = Compressor(transport)
        first.bind()
        first.engine.step()
        first.average("the optimizer")
        saved = first.state_dict()
        second = Compressor(transport)
        assert second.state_dict() == EMPTY
        second.load_state_dict(saved)
        assert second.state_dict()["step"] == 1
        second.bind()
        assert second.residual_norm == first.residual_norm > 0
        third = Compressor(transport)
        third.load_state_dict(saved)
        third.reset()
        assert third.state_dict() == EMPTY
        third.bind()
        assert third.residual_norm == 0
        fourth = Compressor(transport)
        if transport.rank:
            fourth.load_state_dict(saved)
        with pytest.raises(LayoutError, match="on every rank, or none"):
            fourth.bind()
        assert not fourth.is_bound

    run_ranks(2, one_rank)


def test_reset_and_load_begin_a_new_generation():
    def one_rank(transport):
        compressor = Compressor(transport)
        compressor.bind()
        seen = [compressor.generation]
        compressor.reset()
        seen.append(compressor.generation)
        compressor.load_state_dict({})
        assert len({*seen, compressor.generation}) == 3

    run_ranks(2, one_rank)


@pytest.mark.parametrize("members", [FakeSet(1, [0]), FakeSet(2, [1, 2])], ids=["one process", "outside"])
def test_alone(members, recwarn):
    compressor = Compressor(None)
    with pytest.raises(ConfigError, match=r"Compression.dgc\(...\) was given no tensors: pass some"):
        compressor._exchanging("tensors: pass some")
    compressor.bind(process_set=members)
    assert compressor.is_bound
    assert compressor._exchanging("tensors") is None
    told = compressor.describe()
    assert (told["density"], told["sparsified_share"], told["ranks"], told["transport"]) == (1.0, 0.0, 1, "none")
    for harmless in (EMPTY, {}, INACTIVE):
        compressor.load_state_dict(harmless)
    assert not recwarn.list
    state = {"step": 3, "size": 2, "parameters": {"a": {}}}
    early = Compressor(None)
    early.load_state_dict(state)
    if members.included():
        assert compressor.state_dict() == INACTIVE
        with pytest.warns(RuntimeWarning, match="are dropped"):
            compressor.load_state_dict(state)
        with pytest.warns(RuntimeWarning, match="are dropped"):
            early.bind(process_set=members)
        return
    with pytest.raises(LayoutError, match="save the state of a rank that is"):
        compressor.state_dict()
    compressor.load_state_dict(state)
    early.bind(process_set=members)
    assert not recwarn.list


def test_a_list_of_sparsities_without_a_ramp_up_is_a_warning(recwarn):
    for harmless in ({"sparsity": [0.9]}, {"sparsity": [0.5, 0.9], "rampup_step": 1}, {"sparsity": [0.9, 0.9]}):
        Compressor(None, **harmless)
    assert not recwarn.list
    with pytest.warns(RuntimeWarning, match=r"is 0\.9, the last of the list, from step 6 on: give rampup_step="):
        Compressor(None, sparsity=[0.5, 0.9], rampup_begin_step=5)
