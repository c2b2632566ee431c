"""The shared half of what is asked of Horovod."""

from types import SimpleNamespace

import pytest
from fakes import FakeHorovod, FakeSet

from dgc.adapter.job import check_placeholder
from dgc.errors import ConfigError


def test_what_is_missing_is_said():
    for hvd, text in (
        (ImportError("no such file"), "importing horovod.frame failed: no such file. Build Horovod for the installed"),
        (SimpleNamespace(), "built without Frame"),
    ):
        with pytest.raises(ConfigError, match=text):
            FakeHorovod(module_of=hvd).module()
    with pytest.raises(ConfigError, match=r"call hvd.init\(\) before anything of dgc.frame"):
        FakeHorovod(initialized=False).module()
    assert FakeHorovod(initialized=False).module(initialized=False)


def test_the_process_set_of_two_is_the_one_that_is_named():
    horovod = FakeHorovod()
    some = FakeSet(3, [0, 1])
    assert horovod.of() is horovod
    assert horovod.members is horovod.everyone
    assert horovod.of(some).members is some
    assert horovod.of(None, some).members is some
    assert horovod.of(some, FakeSet(3, [0, 1])).members is some
    for other in (horovod.everyone, FakeSet(4, [0, 1]), FakeSet(None, [0, 1])):
        with pytest.raises(ConfigError, match="different process sets"):
            horovod.of(some, other)
    with pytest.raises(ConfigError, match="different process sets"):
        horovod.of(FakeSet(None, [0]), FakeSet(None, [0]))


def test_who_is_alone():
    horovod = FakeHorovod()
    assert horovod.is_alone() is False
    assert horovod.is_alone(FakeSet(1, [0])) is True
    assert horovod.is_alone(FakeSet(1, [1, 2])) is True
    assert FakeHorovod(initialized=False).is_alone() is None


def test_names_are_new_each_time():
    horovod = FakeHorovod()
    names = {horovod.unique_name(prefix) for prefix in ("one", "one", "two")}
    assert len(names) == 3
    assert horovod.asked[0] == "dgc.0.one.number"


def test_ops():
    horovod = FakeHorovod()
    horovod.hvd.Average, horovod.hvd.Sum, horovod.hvd.Adasum = 1, 2, 3  # names are texts already
    assert [horovod.op_name(op) for op in ("Sum", 1, 2)] == ["sum", "average", "sum"]
    assert [horovod.reduce_op(name) for name in ("average", "Sum", 2, None)] == [1, 2, 2, None]
    with pytest.raises(ConfigError, match="op is 'max'"):
        horovod.reduce_op("max")
    for op, text in ((object(), "op=<object"), (horovod.hvd.Adasum, "op=Adasum")):
        with pytest.raises(ConfigError, match=f"{text}.* cannot be combined with gradient compression"):
            horovod.op_name(op)


@pytest.mark.parametrize(
    ("value", "op", "text"),
    [
        (2.0, "average", "Horovod sums"),
        (1.0, "sum", "Horovod averages"),
        (0.5, "average", "or call join.compression. of dgc.torch or dgc.tensorflow, not"),
    ],
)
def test_placeholders(value, op, text):
    check_placeholder(1.0, op="average", size=2)
    check_placeholder(2.0, op="sum", size=2)
    with pytest.raises(ConfigError, match=text):
        check_placeholder(value, op=op, size=2)
