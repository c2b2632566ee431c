"""Names, numbers and facts of the compressors."""

import subprocess
import sys
from typing import ClassVar

import numpy as np
import pytest

from dgc.__main__ import facts
from dgc.adapter.compression import constructor
from dgc.core.compressors import PerTensor, compressor_class, compressor_names, make_config, register
from dgc.errors import ConfigError

NUMBERS = {
    "dgc": 1,
    "topk": 2,
    "strom": 3,
    "dryden": 4,
    "adacomp": 5,
    "onebit": 6,
    "qsgd": 7,
    "terngrad": 8,
    "dorefa": 9,
}


def test_numbers_on_the_wire_never_change():
    assert {name: compressor_class(name).number for name in NUMBERS} == NUMBERS
    assert tuple(NUMBERS) == compressor_names()[: len(NUMBERS)]


def test_every_row_states_its_facts():
    for name, bits, feedback, unbiased, source in facts():
        assert bits
        assert source
        assert {feedback, unbiased} <= {"yes", "no"}
        row = compressor_class(name)
        assert "Source:" in row.__doc__
        # A compressor that forgets what it does not send must at least be right on average.
        assert row.error_feedback or row.unbiased


def test_the_patent_of_adacomp_is_mentioned():
    assert "US 11,295,208" in compressor_class("adacomp").__doc__


def test_the_command_prints_the_table():
    out = subprocess.run([sys.executable, "-m", "dgc", "compressors"], capture_output=True, text=True, check=True)
    lines = out.stdout.splitlines()
    assert lines[0].split("  ")[0].strip() == "name"
    for name in NUMBERS:
        assert any(line.startswith(name + " ") for line in lines)
    wrong = subprocess.run([sys.executable, "-m", "dgc", "compresors"], capture_output=True, text=True)
    assert wrong.returncode != 0
    assert "compressors" in wrong.stderr


def make_row(**facts):
    class Row(PerTensor):
        name = "mine"
        number = 200
        source = "here"
        bits = "8"
        error_feedback = True

        def tensor_bytes(self, tensor, spec):
            return tensor.n

        def encode_tensor(self, x, out, tensor, spec, info):
            return tensor.n

        def decode_tensor(self, data, tensor, spec):
            return np.zeros(tensor.n, np.float32)

    for name, value in facts.items():
        setattr(Row, name, value)
    return Row


class TestRegister:
    taken: ClassVar = [
        ({"name": "dgc"}, "collides"),
        ({"number": 7}, "128 to 255"),
        ({"number": 256}, "128 to 255"),
        ({"name": "fp16"}, "name of its own"),
        ({"name": "two words"}, "Python name"),
    ]

    @pytest.mark.parametrize(("facts", "message"), taken, ids=str)
    def test_what_is_taken_is_refused(self, facts, message):
        with pytest.raises(ConfigError, match=message):
            register(make_row(**facts))
        assert "mine" not in compressor_names()


def test_an_unknown_compressor_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match="'powersgd'; choose one of dgc, topk"):
        make_config({}, algorithm="powersgd")
    with pytest.raises(AttributeError, match="none, fp16, dgc"):
        constructor("powersgd", object(), print)


def test_only_dgc_adopts_momentum_unless_asked():
    for name in compressor_names():
        assert (make_config({}, algorithm=name).momentum is None) is (name == "dgc")
    assert make_config({"momentum": None}, algorithm="strom").momentum is None
