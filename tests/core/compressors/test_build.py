"""From options to a config."""

import pytest

from dgc.core.codecs import index_codec_names, value_codec_names
from dgc.core.compressors import check_codecs, make_config
from dgc.errors import ConfigError


def test_the_owner_is_named_in_errors():
    with pytest.raises(TypeError, match=r"^Compression.topk got an unknown option 'levels'; valid options: .*sparsity"):
        make_config({"levels": 3}, algorithm="topk")
    with pytest.raises(TypeError, match=r"^Compression.mine got"):
        make_config({"levels": 3}, algorithm="topk", owner="mine")


def test_the_options_of_the_compressor_and_of_all_come_in_one_dictionary():
    config = make_config({"bits": 8, "seed": 3}, algorithm="qsgd")
    assert (config.own.bits, config.seed) == (8, 3)


def test_every_codec_can_be_chosen_and_auto_for_indices_only():
    for indices in (*index_codec_names(), "auto"):
        for values in value_codec_names():
            check_codecs(indices, values, "int8")
    with pytest.raises(ConfigError, match=r"^values is 'auto'; allowed: "):
        check_codecs("auto", "auto", "int8")


def test_small_tensors_take_every_codec_of_float32():
    for small in ("float32", "float16", "bfloat16", "int8", "int3", "int2", "sign"):
        assert make_config({"small": small}).small == small
    for wrong in ("float64", "auto", None):
        with pytest.raises(
            ConfigError,
            match=r"^small is .*; allowed: 'float16', 'float32', 'bfloat16', 'int8', 'int3', 'int2', 'sign'",
        ):
            make_config({"small": wrong})


def test_only_dgc_codes_small_tensors_unless_asked():
    assert make_config({}).small == "int3"
    assert make_config({}, algorithm="qsgd").small == "float32"
