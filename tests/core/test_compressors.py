"""Compressors by name, from options to a config, and the bytes that they write."""

import subprocess
import sys

import numpy as np
import pytest
from contract_tools import Alone, Case
from documented import own_names
from golden import regenerate_compressors as golden

from dgc.__main__ import facts
from dgc.core.compressors import PerTensor, compressor_class, compressor_names, make_config, register
from dgc.errors import ConfigError, WireError

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


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"name": "dgc"}, "collides"),
        ({"number": 7}, "128 to 255"),
        ({"number": 256}, "128 to 255"),
        ({"name": "fp16"}, "name of its own"),
        ({"name": "two words"}, "Python name"),
    ],
    ids=str,
)
def test_what_is_taken_is_refused(facts, message):
    with pytest.raises(ConfigError, match=message):
        register(type("Other", (Row,), facts))
    assert "mine" not in compressor_names()


def test_only_dgc_adopts_momentum_unless_asked():
    for name in compressor_names():
        assert (make_config({}, algorithm=name).momentum is None) is (name == "dgc")
    assert make_config({"momentum": None}, algorithm="strom").momentum is None


def test_the_owner_is_named_in_errors():
    with pytest.raises(TypeError, match=r"^Compression.mine got"):
        make_config({"levels": 3}, algorithm="topk", owner="mine")


def test_only_dgc_codes_small_tensors_unless_asked():
    assert make_config({}).small == "int3"
    assert make_config({}, algorithm="qsgd").small == "float32"


@pytest.mark.parametrize(
    ("case", "at", "codes"),
    [
        (Case("terngrad"), 4, [243]),  # more than five ternary numbers can be
        (Case("terngrad"), 3, [0xFF]),  # the scale becomes negative or no number
        (Case("qsgd"), 16, [0xFF]),  # level 15 of 0 to 14
        (Case("qsgd", {"bits": 8}), 16, [0xFF]),
        (Case("adacomp", {"fc_bin": 50}), 8, [0x3E]),  # index 62 in a bin of 50
        (Case("adacomp", {"fc_bin": 50}), 8, [0x3F]),  # the mark of an empty bin that is not its last unit
        (Case("dryden"), 2, [0xFF, 0x7F]),  # a mean that is no number
        (Case("onebit"), 2, [0xFF, 0x7F]),
        (Case("dorefa"), 3, [0xFF]),
    ],
    ids=str,
)
def test_codes_that_no_sender_writes_are_refused(case, at, codes):
    alone = Alone(case, {"w": (40, 40)})
    message, count, _ = alone.encode(alone.random())
    alone.decode(message, count)
    message[at : at + len(codes)] = codes
    with pytest.raises(WireError):
        alone.algorithm.decode(message, count, alone.spec)


@pytest.mark.parametrize("name", ["qsgd", "terngrad", "dorefa", "onebit", "dryden", "adacomp"])
def test_norms_and_means_beyond_float32_arrive_as_its_largest(name):
    alone = Alone(Case(name), {"w": (40, 40)})
    x = alone.flat({"w": 3.4e38 * np.where(np.arange(1600) % 2, 1, -1)})
    with np.errstate(over="ignore"):
        message, count, _ = alone.encode(x)
    decoded = alone.decode(message, count)
    assert np.isfinite(decoded).all()
    assert (np.sign(decoded) * np.sign(x) >= 0).all()


@pytest.mark.parametrize("case", golden.CASES, ids=str)
def test_bytes_have_not_changed(case):
    wanted = bytes.fromhex((golden.FOLDER / f"{case}.hex").read_text().replace("\n", ""))
    assert golden.message(case) == wanted


def test_every_compressor_has_a_golden_message():
    assert {case.name for case in golden.CASES} == set(own_names()) - {"dgc"}  # dgc's are in golden/wire
