"""``Compression`` and the refusals of the wrappers, without a framework."""

import inspect
from types import SimpleNamespace

import pytest
from fakes import FakeHorovod

from dgc.adapter import compressor as shared
from dgc.adapter.compressor import CompressorBase
from dgc.errors import ConfigError


class Made(shared.CompressionBase):
    def _make(self, algorithm, names=None, optimizer=None, **options):
        return algorithm, names, optimizer, options


class Ours(CompressorBase):
    _job = FakeHorovod()


class Theirs(CompressorBase):
    _job = FakeHorovod()


def test_horovods_own_need_no_init():
    made = Made(FakeHorovod(initialized=False))
    theirs = [shared.horovods(given) for given in (made.none, made.fp16, None, "another")]
    assert theirs == ["none of theirs", "fp16 of theirs", None, "another"]


def test_horovods_own_are_looked_up_where_they_are_used():
    without = FakeHorovod(module_of=ImportError("none here"))
    made = Made(without)
    assert made.none is made.none
    assert {"none", "fp16", "dgc"} <= dict(inspect.getmembers(made)).keys()
    shared.check_compression(made.fp16, Ours, "dgc.frame")
    with pytest.raises(ConfigError, match="needs Horovod"):
        made.fp16.compress("a gradient")
    without.hvd = FakeHorovod(initialized=False).hvd
    without.hvd.Compression.fp16 = SimpleNamespace(
        compress=lambda t: (t, "context"), decompress=lambda t, ctx: (t, ctx)
    )
    assert made.fp16.compress("a gradient") == ("a gradient", "context")
    assert made.fp16.decompress("a result", "context") == ("a result", "context")


def test_all_constructors_are_listed_and_there():
    made = Made(FakeHorovod())
    listed = dir(made)
    assert {"none", "fp16", "dgc", "topk"} <= set(listed)
    for name in set(listed) - {"none", "fp16", "from_dict"}:
        assert getattr(made, name)("tensors", op="sum") == (name, "tensors", None, {"op": "sum"})
    with pytest.raises(AttributeError, match="Compression has no 'topc'; it has none, fp16, "):
        _ = made.topc


def test_settings_of_a_file():
    made = Made(FakeHorovod())
    settings = {
        "name": "dgc",
        "sparsity": ["0.75", 0.999],
        "rampup_step": "500",
        "momentum": "null",
        "momentum_masking": "False",
        "weight_decay": "1e-4",
        "exclude": ["*.bias", "3"],
        "hierarchical": "auto",
        "exchange": "gather",
    }
    name, tensors, optimizer, options = made.from_dict(settings)
    assert (name, tensors, optimizer) == ("dgc", None, None)
    assert options == {
        "sparsity": [0.75, 0.999],
        "rampup_step": 500,
        "momentum": None,
        "momentum_masking": False,
        "weight_decay": 1e-4,
        "exclude": ["*.bias", "3"],
        "hierarchical": "auto",
        "exchange": "gather",
    }
    assert Ours(options).config.sparsity == (0.75, 0.999)
    assert made.from_dict({"name": "none"}) is made.none
    assert made.from_dict({"name": "fp16"}) is made.fp16


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"name": "fp16", "sparsity": 1}, TypeError, r"Compression\.fp16 has no options"),
        ({"sparsity": 0.9}, ConfigError, "there is no compressor ''; choose one of dgc, "),
        ({"name": "powersgd"}, ConfigError, "there is no compressor 'powersgd'"),
        ({"name": ["dgc"]}, ConfigError, r"there is no compressor \['dgc'\]"),
        ("dgc", ConfigError, "options are 'dgc'; give a mapping"),
    ],
)
def test_settings_that_name_nothing(settings, error, match):
    with pytest.raises(error, match=match):
        Made(FakeHorovod()).from_dict(settings)


def test_compressors_of_another_framework():
    shared.check_compression(None, Ours, "dgc.frame")

    class WithMethods(Theirs):
        compress = decompress = None

    with pytest.raises(ConfigError, match=r"another framework; take it from dgc.frame.Compression"):
        shared.check_compression(WithMethods({}), Ours, "dgc.frame")
    with pytest.raises(ConfigError, match=r"name is .*; it takes a text"):
        shared.check_compression(None, Ours, "dgc.frame", name=Ours({}))
    with pytest.raises(ConfigError, match="no compressor"):
        shared.check_compression("dgc", Ours, "dgc.frame")


def test_a_class_or_a_constructor_that_was_not_called():
    class WithMethods(Ours):
        compress = decompress = None

    made = Made(FakeHorovod())
    for value in (WithMethods, made.topk):
        with pytest.raises(ConfigError, match="no compressor; call one"):
            shared.check_compression(value, Ours, "dgc.frame")
    with pytest.raises(ConfigError, match=r"call one: compression=Compression.topk\(\)"):
        made.topk.compress("a gradient")  # as Horovod's own wrapper calls it
