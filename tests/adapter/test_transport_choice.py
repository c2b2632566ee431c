"""Which transport a job gets: all ranks decide alike, whatever one of them lacks. Horovod and MPI are stand-ins."""

from types import SimpleNamespace

import pytest

from dgc.adapter import transport_choice as module
from dgc.adapter.transport_choice import choose_transport, require_no_choice, tell_no_choice
from dgc.errors import ConfigError, TransportError


def horovod(**facts):
    known = {"mpi_built": True, "mpi_enabled": True, "mpi_threads_supported": True, "rank": 0, "size": 2, **facts}
    return SimpleNamespace(**{name: lambda value=value: value for name, value in known.items()})


@pytest.fixture
def mpi(monkeypatch):
    """An MPI that works, with what its transport was made with."""
    made = []
    running = SimpleNamespace(Is_initialized=lambda: True, COMM_WORLD="world")
    monkeypatch.setattr(module, "import_mpi", lambda start: running)
    monkeypatch.setattr(module, "why_unusable", lambda *arguments: None)
    monkeypatch.setattr(module, "MPITransport", lambda **options: made.append(options) or "mpi")
    module.warn_once.cache_clear()
    return SimpleNamespace(made=made, running=running)


def chosen(choice, hvd=None, others=()):
    """The choice of rank 0 among ``others``: (rank, choice, refusal)."""

    def gather(own, question):
        told = [{"rank": rank, "choice": what, "refusal": refusal} for rank, what, refusal in others]
        return sorted([own, *told], key=lambda answer: answer["rank"])

    return choose_transport(choice, hvd or horovod(), gather, lambda: "horovod")


@pytest.mark.parametrize("choice", ["auto", "mpi"])
def test_mpi_where_every_rank_can_use_it(choice, mpi, recwarn):
    assert chosen(choice, others=[(1, choice, None)]) == "mpi"
    assert mpi.made == [{"expect_rank": 0, "expect_size": 2, "ranks": None}]
    assert not recwarn.list


def test_some_ranks_without_a_compressor(mpi):
    text = r"rank 1 has no compressor of dgc's, and rank 0 has one; give every rank the same compression="
    with pytest.raises(ConfigError, match=text):
        chosen("mpi", others=[(1, None, None)])
    with pytest.raises(ConfigError, match=text):
        require_no_choice(1, lambda own, *_: [{"rank": 0, "choice": "auto", "refusal": None}, own])
    require_no_choice(1, lambda own, *_: [own, own])


def test_a_rank_that_fails_before_it_chooses(mpi):
    told = []
    tell_no_choice(ConfigError("its argument is wrong"), 1, lambda own, *_: told.append(own))
    for ask in ("auto", None):
        with pytest.raises(ConfigError, match="rank 1: its argument is wrong"):
            require_no_choice(0, lambda own, *_: [{**own, "choice": ask}, *told])  # noqa: B023


def test_ranks_that_cannot_be_asked(mpi):
    def gather(*_):
        raise TransportError("Horovod could not gather 47 bytes")

    with pytest.raises(TransportError, match=r"^Horovod could not .*; build a compressor on every rank, or on none$"):
        choose_transport("mpi", horovod(), gather, None)


def test_a_process_set_gets_its_ranks(mpi):
    chosen("mpi", horovod(size=4), others=[(3, "mpi", None)])
    assert mpi.made == [{"expect_rank": 0, "expect_size": 4, "ranks": [0, 3]}]


def test_one_rank_without_mpi_takes_all_to_horovod_with_one_warning(mpi, recwarn):
    others = [(1, "auto", "no mpi4py")]
    assert [chosen("auto", others=others) for _ in range(2)] == ["horovod"] * 2
    (warning,) = recwarn.list
    assert warning.category is RuntimeWarning
    assert "instead of mpi4py's: rank 1: no mpi4py" in str(warning.message)


@pytest.mark.parametrize("hvd", [horovod(mpi_enabled=False), horovod(rank=1)])
def test_nobody_else_warns_and_under_gloo_nobody(hvd, mpi, recwarn):
    assert chosen("auto", hvd, [(1 - hvd.rank(), "auto", "no mpi4py")]) == "horovod"
    assert not recwarn.list


def test_mpi_by_name_is_an_error_where_one_rank_cannot(mpi):
    with pytest.raises(
        TransportError, match=r"cannot be used. rank 1: no mpi4py. transport=\"auto\" or \"horovod\" works"
    ):
        chosen("mpi", others=[(1, "mpi", "no mpi4py")])
    assert not mpi.made


def test_horovod_by_name_does_not_even_look_for_mpi(monkeypatch, recwarn):
    monkeypatch.setattr(module, "import_mpi", lambda start: pytest.fail("looked for MPI"))
    assert chosen("horovod", others=[(1, "horovod", None)]) == "horovod"
    assert not recwarn.list


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"mpi_built": False}, "Horovod was built without MPI"),
        ({"mpi_enabled": False}, "mpi4py would see a world of one"),
        ({"mpi_threads_supported": False}, "unset HOROVOD_MPI_THREADS_DISABLE"),
    ],
)
def test_mpi_is_not_imported_where_horovod_does_not_run_on_it(facts, reason, monkeypatch):
    monkeypatch.setattr(module, "import_mpi", lambda start: pytest.fail("imported MPI"))
    with pytest.raises(TransportError, match=reason):
        chosen("mpi", horovod(**facts))


def test_another_mpi_than_horovods_is_refused_with_the_command(mpi):
    mpi.running.Is_initialized = lambda: False
    with pytest.raises(TransportError, match="pip install --no-binary mpi4py mpi4py"):
        chosen("mpi")
