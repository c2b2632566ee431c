"""Which backend is taken, and what is said about it."""

import logging
import sys

import pytest

from dgc.core import kernels as choose
from dgc.core.kernels.reference import ReferenceKernels
from dgc.errors import ConfigError


@pytest.fixture(autouse=True)
def no_memory():
    choose.choose_kernels.cache_clear()
    yield
    choose.choose_kernels.cache_clear()


def test_numba_where_it_works(caplog):
    caplog.set_level(logging.INFO, "dgc")
    kernels = choose.choose_kernels("cpu")
    assert kernels.name == "numba"
    assert choose.choose_kernels("cpu") is kernels
    (said,) = [r for r in caplog.records if "compression runs on" in r.message]
    assert said.levelname == "INFO"
    assert kernels.describe() in said.message


def test_without_numba_there_is_an_import_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in ("compile", "cpu", "simd", "sweep", "threads"):
        monkeypatch.delitem(sys.modules, f"dgc.core.kernels.{name}", raising=False)
    with pytest.raises(ImportError, match="numba"):
        choose.choose_kernels("cpu")


def test_kernels_that_compute_nonsense_are_refused(monkeypatch):
    from dgc.core.kernels.cpu import NumbaKernels

    def broken(self, *args):
        return ReferenceKernels().accumulate_and_select([], *args[1:])

    monkeypatch.setattr(NumbaKernels, "accumulate_and_select", broken)
    with pytest.raises(ArithmeticError, match="another result than the reference"):
        choose.choose_kernels("cpu")


def test_a_wrong_option_is_not_taken_for_a_broken_numba(monkeypatch):
    monkeypatch.setenv("DGC_NUM_THREADS", "many")
    with pytest.raises(ConfigError, match="DGC_NUM_THREADS"):
        choose.choose_kernels("cpu")


def test_an_unknown_device_is_refused():
    with pytest.raises(ConfigError, match=r"'tpu'.*allowed: cpu, gpu"):
        choose.choose_kernels("tpu")


def test_a_gpu_that_is_not_there_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match="cupy-cuda12x"):
        choose.choose_kernels("gpu")
