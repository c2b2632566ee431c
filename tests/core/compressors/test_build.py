"""From options to a config: what a wrapper makes of its members, and what it refuses with advice."""

from types import SimpleNamespace

import pytest

from dgc.core.codecs import index_codec_names, value_codec_names
from dgc.core.compressors import check_codecs, make_config, make_wrapper_config
from dgc.errors import ConfigError


def member(algorithm="topk", *, bound=False, **options):
    return SimpleNamespace(config=make_config(options, algorithm=algorithm), given_options=options, is_bound=bound)


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
        assert make_wrapper_config("by_size", {0: member()}, {"small": small}).small == small
    for wrong in ("float64", "auto", None):
        with pytest.raises(
            ConfigError,
            match=r"^small is .*; allowed: 'float16', 'float32', 'bfloat16', 'int8', 'int3', 'int2', 'sign'",
        ):
            make_config({"small": wrong})
        with pytest.raises(ConfigError, match=r"^small is "):
            make_wrapper_config("by_size", {0: member()}, {"small": wrong})


def test_only_dgc_codes_small_tensors_unless_asked():
    assert make_config({}).small == "int3"
    assert make_config({}, algorithm="qsgd").small == "float32"
    wrapper = make_wrapper_config("by_name", {"*": member("dgc")}, {})
    assert wrapper.small == wrapper.own.configs[0].small == "float32"


def test_keys_are_put_in_order_but_patterns_stay_in_theirs():
    given = {100: member(), 0: None, 9: member("qsgd")}
    assert make_wrapper_config("by_size", given, {}).own.keys == (0, 9, 100)
    assert make_wrapper_config("by_name", {"z*": None, "a*": member()}, {}).own.keys == ("z*", "a*")


def test_what_concerns_all_tensors_is_the_wrappers_also_in_its_members():
    config = make_wrapper_config("by_size", {0: None, 9: member(sparsity=0.5)}, {"momentum": 0.7, "seed": 4})
    none, own = config.own.configs
    assert none is None
    assert (own.sparsity, own.momentum, own.seed, own.algorithm) == ((0.5,), 0.7, 4, "topk")


def test_a_dense_warm_up_is_the_wrappers_own_first_step():
    config = make_wrapper_config("by_step", {0: None, 500: member(), 900: member("qsgd")}, {})
    assert config.rampup_begin_step == 500
    assert config.own.keys == (0, 900)
    assert [c.algorithm for c in config.own.configs] == ["topk", "qsgd"]


@pytest.mark.parametrize(
    ("kind", "members", "options", "advice"),
    [
        ("by_size", {}, {}, "give {0: None, 100_000: Compression.topk()}"),
        ("by_size", [member()], {}, "give {0: None"),
        ("by_size", {-1: None}, {}, "got the key -1"),
        ("by_size", {True: None}, {}, "got the key True"),
        ("by_size", {"0": None}, {}, "got the key '0'"),
        ("by_step", {0.0: None}, {}, "got the key 0.0"),
        ("by_name", {0: member()}, {}, "the first pattern that fits counts"),
        ("by_size", {5: member()}, {}, "begins with 5; give a member for 0"),
        ("by_step", {0: None}, {}, "give the step at which a compressor follows"),
        ("by_step", {0: None, 5: member()}, {"rampup_begin_step": 3}, "by_step with None at 0 is a dense warm-up"),
        ("by_step", {0: member(), 5: None}, {}, "cannot go back to no compression"),
        ("by_size", {0: "topk"}, {}, "the member 0 of Compression.by_size is 'topk'; give a compressor"),
        ("by_size", {0: member(bound=True)}, {}, "without parameters, or None"),
        ("by_size", {0: member(momentum=0.5)}, {}, "'momentum' concerns all tensors alike; give it to Compression.by_"),
        ("by_size", {0: member(seed=5)}, {}, "'seed' concerns all tensors alike"),
    ],
)
def test_what_cannot_be_is_refused_with_advice(kind, members, options, advice):
    with pytest.raises(ConfigError) as refusal:
        make_wrapper_config(kind, members, options)
    assert advice in str(refusal.value)


def test_a_wrapper_is_no_member_of_another():
    inner = SimpleNamespace(config=make_wrapper_config("by_size", {0: member()}, {}), given_options={})
    with pytest.raises(ConfigError, match=r"give a compressor such as Compression.topk"):
        make_wrapper_config("by_step", {0: inner}, {})


def test_an_option_of_one_compressor_belongs_to_the_member():
    with pytest.raises(TypeError, match=r"unknown option 'sparsity'.*options of one compressor belong to that member"):
        make_wrapper_config("by_size", {0: member()}, {"sparsity": 0.9})
