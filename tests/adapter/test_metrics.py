"""The mapping that users read, and the log, without ranks."""

import warnings
from types import SimpleNamespace

import pytest

from dgc.adapter.compressor import CompressorBase
from dgc.adapter.metrics import NOWHERE, Log, Metrics
from dgc.core.probe import TensorFigures
from dgc.errors import ConfigError

FIGURES = {"fc": TensorFigures(10, 2, 4.0, 1.0), "new": TensorFigures(5, 0, 0.0, 0.0)}
SEEN = SimpleNamespace(step=200, figures=FIGURES, left_out={"bias": "sent dense"})
OTHER = SimpleNamespace(step=199, figures={"head": TensorFigures(10, 0, 1.0, 1.0)}, left_out={})
"""What exchanges have looked at."""


class Kept:
    def __init__(self):
        self.rows = []

    def add_scalar(self, tag, value, step):
        self.rows.append((tag, value, step))


def test_several_exchanges_are_one_mapping():
    look = Metrics.into([SEEN, OTHER])
    assert list(look) == ["fc", "new", "head"]
    assert look.step == 200
    assert look.nothing is None
    assert look.total.elements == 25
    assert look.total.sent == 2
    assert "bias" not in look
    with pytest.raises(KeyError, match="sent dense"):
        look["bias"]
    with pytest.raises(KeyError, match="there is no such tensor"):
        look["?"]
    lines = str(look).splitlines()
    assert [line.split()[0] for line in lines] == ["step", "total", "fc", "new", "head"]
    assert "nan" in lines[3]  # there was nothing to send of it


def test_an_empty_one_says_why():
    assert Metrics().nothing == "no step was looked at yet"
    dense = Metrics(3, {}, {"a": "the step was dense", "b": "the step was dense", "c": "sent dense"})
    assert dense.nothing == "the step was dense; sent dense"
    assert str(dense) == dense.nothing
    with pytest.raises(KeyError, match="the step was dense"):
        dense["b"]
    assert "log_to" in CompressorBase({}).inside.nothing


def test_what_is_written():
    writer = Kept()
    Log(writer, 100, "mine", waits=True).take(SEEN)
    rows = {tag: value for tag, value, _ in writer.rows}
    assert rows["mine.residual_norm/fc"] == 1.0
    assert rows["mine.sent_share/fc"] == 0.75
    assert rows["mine.total/density"] == pytest.approx(2 / 15)
    # Figures of nothing are no figures.
    assert [tag for tag in rows if tag.endswith("/new")] == ["mine.residual_norm/new", "mine.density/new"]
    assert {step for _, _, step in writer.rows} == {200}


def test_a_log_of_some_tensors_has_no_total():
    writer = Kept()
    log = Log(writer, 100, "mine", waits=True)
    log.writes_total = False
    log.take(SEEN)
    assert not any("total" in tag for tag, _, _ in writer.rows)


def test_which_steps_are_looked_at():
    log = Log(NOWHERE, 100, "", waits=True)
    assert [step for step in range(301) if log.wants(step)] == [0, 100, 200, 300]


@pytest.mark.parametrize("every", [0, -1, 2.0, True, "1", None])
def test_bad_intervals(every):
    with pytest.raises(ConfigError, match="every is"):
        Log(NOWHERE, every, "", waits=True)


class Failing:
    def add_scalar(self, tag, value, step):
        raise OSError("disk full")


@pytest.mark.parametrize("action", ["always", "error"])
def test_a_failure_is_told_once(action):
    """Where a warning would be an exception, only where that does no harm."""
    log, shown = Log(Failing(), 1, "", waits=True), []
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        warnings.showwarning = lambda message, *rest: shown.append(str(message))
        log.take(SEEN)
        assert log.is_off
        assert shown == []
        if action == "error":
            with pytest.raises(RuntimeWarning, match="OSError: disk full"):
                log.tell()
        else:
            log.tell()
            assert len(shown) == 1
        log.tell()
        log.remind()
        assert len(shown) == (action == "always")


@pytest.mark.parametrize("action", ["always", "error"])
def test_a_failure_is_shown_at_once_where_nobody_tells(action):
    shown = []
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        warnings.showwarning = lambda message, *rest: shown.append(str(message))
        Log(Failing(), 1, "", waits=False).take(SEEN)
    assert len(shown) == 1
