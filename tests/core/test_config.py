"""Options: what is refused and what a refusal says; the schedule, and how many entries that is."""

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest

from dgc.core import checks
from dgc.core.compressors import make_config
from dgc.core.config import ADAPTIVE_FLOOR, Schedule, entries_to_send
from dgc.errors import ConfigError

BAD = [
    ({"sparsity": 1.0}, r"sparsity .*\[0, 1\)"),
    ({"sparsity": -0.1}, r"sparsity .*\[0, 1\)"),
    ({"sparsity": [0.5, float("nan")]}, r"sparsity .*\[0, 1\)"),
    ({"sparsity": []}, "sparsity"),
    ({"sparsity": "0.9"}, "sparsity"),
    ({"sparsity": 10**400}, "sparsity"),
    ({"sparsity": np.zeros((2, 2))}, "sparsity"),
    ({"momentum": 1.5}, r"momentum is 1.5; allowed: a number in "),
    ({"momentum": True}, "momentum is True; allowed: a number in "),
    ({"momentum": np.zeros(2)}, "momentum"),
    ({"momentum": 10**400}, "momentum"),
    ({"momentum": 0, "nesterov": True}, "nesterov"),
    ({"momentum": 1.0}, r"momentum is 1.0; allowed: a number in \[0(\.0)?, 1(\.0)?\)"),
    ({"weight_decay": True}, "weight_decay is True; allowed: a number in "),
    ({"weight_decay": float("nan")}, "weight_decay is nan; allowed: a number in "),
    ({"weight_decay": -1}, "weight_decay is -1; allowed: a number in "),
    ({"local_grad_clip_norm": 0}, r"local_grad_clip_norm is 0; allowed: a number in \(0.*, inf\) or None"),
    ({"rampup_begin_step": -1}, "rampup_begin_step is -1; allowed: a whole number >= 0"),
    ({"rampup_step": 0}, "rampup_step is 0; allowed: a whole number >= 1"),
    ({"bucket_bytes": 0}, "bucket_bytes is 0; allowed: a whole number >= 1"),
    ({"min_numel": np.float32(3)}, "min_numel .* allowed: a whole number"),
    ({"min_numel": True}, "min_numel is True; allowed: a whole number"),
    ({"clip_scope": "layer"}, "clip_scope is 'layer'; allowed: "),
    ({"clip_scope": np.zeros(2)}, "clip_scope .* allowed: "),
    ({"op": "adasum"}, "op"),
    ({"indices": "int7"}, "indices is 'int7'; allowed: .*'uint16'"),
    ({"values": "float1"}, "values is 'float1'; allowed: .*'float16'"),
    ({"values": ["float16"]}, "values"),
    ({"small": "float64"}, "small is 'float64'; allowed: 'float16', 'float32', 'int8', 'int4', 'int3', 'int2'"),
    ({"small": None}, "small is None; allowed: 'float16', "),
    ({"nesterov": 1}, "nesterov is 1; allowed: True, False or None"),
    ({"momentum_masking": "no"}, "allowed: True, False or None"),
    ({"error_feedback": 0}, "allowed: 'auto', 'step-ahead', 'classic', False"),
    ({"error_feedback": "step-ahead", "momentum": 0.9}, "momentum: with error_feedback='step-ahead'"),
    ({"error_feedback": "step-ahead", "op": "sum"}, "averages updates"),
    ({"error_feedback": "step-ahead", "hierarchical": True}, "does not support hierarchical="),
    ({"late": True}, "late=True needs error_feedback='step-ahead'"),
    ({"exclude": 3}, "exclude"),
    ({"include": np.zeros(3)}, "include"),
]


@pytest.mark.parametrize(("options", "told"), BAD, ids=str)
def test_bad_options_are_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        make_config(options)


def test_numpy_numbers_are_numbers():
    given = make_config(
        {"sparsity": np.array([0.75, 0.5]), "momentum": np.float64(0.5), "min_numel": np.int64(7), "nesterov": np.True_}
    )
    assert (
        given.describe()
        == make_config({"sparsity": (0.75, 0.5), "momentum": 0.5, "min_numel": 7, "nesterov": True}).describe()
    )
    assert type(given.min_numel) is int


def qsgd():
    """Stands for ``Compression.qsgd`` without parentheses."""


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("topk", "Compression.topk()"),
        (qsgd, "Compression.qsgd()"),
        (SimpleNamespace, "Compression.dgc()"),
        (3, "Compression.dgc()"),
        ("not a name", "Compression.dgc()"),
    ],
)
def test_what_is_no_compressor_is_refused_with_the_call_that_makes_one(value, advice):
    with pytest.raises(ConfigError, match=re.escape(f"call one: compression={advice}, or leave it out")):
        checks.require_compressor(value)


def test_horovods_own_compressors_are_compressors():
    checks.require_compressor(None)
    checks.require_compressor(type("Fp16", (), {"compress": None, "decompress": None}))


@pytest.mark.parametrize("value", [0, -1, True, "2", None, float("nan")])
def test_a_loss_scale_is_positive_or_a_function(value):
    with pytest.raises(ConfigError, match=r"a function that returns one, or the GradScaler$"):
        checks.as_loss_scale(value, "GradScaler")


def test_a_loss_scale_is_handed_on():
    assert type(checks.as_loss_scale(2)) is float
    assert checks.as_loss_scale(qsgd) is qsgd


@pytest.mark.parametrize(("steps", "density"), [(1, 1 / 64), (6400, 1 / 64), (10_000, 0.01), (10**6, 0.001)])
def test_each_entry_is_sent_a_hundred_times(steps, density):
    config = make_config({"steps": steps, "momentum": 0.9})
    assert config.sparsity == (pytest.approx(1 - density),)
    assert (config.momentum, config.masks) == (0.9, False)


@pytest.mark.parametrize(
    ("options", "adaptive", "chosen"),
    [
        ({}, True, "step-ahead"),
        ({}, False, "auto"),
        ({"steps": None}, True, "step-ahead"),
        ({"steps": None, "sparsity": 0.999}, True, "step-ahead"),
        ({"steps": None, "sparsity": [0.75, 0.99], "rampup_step": 10}, True, "step-ahead"),
        ({"steps": None, "sparsity": 0.0}, True, "auto"),
        ({"error_feedback": "classic"}, True, "classic"),
        ({"error_feedback": False}, True, False),
        ({"momentum": 0.0}, True, "auto"),
        ({"local_grad_clip_norm": 1.0}, True, "auto"),
        ({"op": "sum"}, True, "auto"),
        ({"hierarchical": True}, True, "auto"),
    ],
)
def test_step_ahead_is_chosen_with_an_adaptive_optimizer(options, adaptive, chosen):
    config = make_config({"steps": 100, **options})
    suited = config.suited(adaptive, steps_ahead=True)
    assert suited.error_feedback == chosen
    assert suited.steps_ahead == (chosen == "step-ahead")
    assert not config.suited(adaptive).steps_ahead, "the adapter cannot exchange updates"
    if config.sparsity and config.steps is None:
        assert (suited.sparsity, suited.rampup_step) == (config.sparsity, config.rampup_step)


@pytest.mark.parametrize(("options", "first_steps"), [({"steps": 100}, 20), ({}, 1000), ({"sparsity": None}, 1000)])
@pytest.mark.parametrize(
    ("ranks", "densities"),
    [
        (1, (0.1, 0.02)),
        (2, (0.1, 0.02)),
        (3, (0.032, 0.032)),
        (4, (0.032, 0.032)),
        (5, (0.05, 0.05)),
        (8, (0.05, 0.05)),
        (9, (0.1, 0.1)),
        (16, (0.1, 0.1)),
        (17, (0.5, 0.5)),
    ],
)
def test_what_step_ahead_sends_depends_on_the_number_of_ranks(ranks, densities, options, first_steps):
    config = make_config(options).suited(True, steps_ahead=True).on_ranks(ranks)
    schedule = Schedule(config.sparsity, config.rampup_begin_step, config.rampup_step)
    first, later = densities
    assert [schedule.density(step) for step in range(2000)] == pytest.approx(
        [first] * first_steps + [later] * (2000 - first_steps)
    )


def test_the_users_ramp_up_holds_for_the_sparsities_that_dgc_chooses(recwarn):
    config = make_config({"rampup_step": 300}).suited(True, steps_ahead=True).on_ranks(2)
    schedule = Schedule(config.sparsity, config.rampup_begin_step, config.rampup_step)
    assert [schedule.density(step) for step in range(300)] == pytest.approx([0.1] * 150 + [0.02] * 150)
    assert not recwarn.list


@pytest.mark.parametrize("options", [{}, {"sparsity": 0.99}, {"sparsity": [0.99, 0.99]}])
def test_a_ramp_up_with_one_sparsity_is_a_warning(options, recwarn):
    make_config(options).suited(False)
    assert not recwarn.list
    with pytest.warns(RuntimeWarning, match="rampup_step=9 has no effect, because the sparsity is 0.99"):
        make_config({**options, "rampup_step": 9}).suited(False)


def test_only_what_dgc_chooses_for_step_ahead_depends_on_the_ranks():
    ahead = {"error_feedback": "step-ahead"}
    for config in (
        make_config({"steps": 100}).suited(True),
        make_config({"steps": 100, **ahead}).suited(False),
        make_config({"sparsity": 0.99, **ahead}).suited(True),
        make_config({"sparsity": [0.9, 0.98], "rampup_step": 9}).suited(True, steps_ahead=True),
        make_config(ahead).suited(False),
        make_config({}).suited(True),
        make_config({}, algorithm="topk").suited(True, steps_ahead=True),
    ):
        assert config.on_ranks(8) is config


@pytest.mark.parametrize("steps", [np.int64(500), None])
def test_numpy_integers_and_none_are_taken(steps):
    assert make_config({"steps": steps}).sparsities == (1 - 1 / 64 if steps else 0.999,)


@pytest.mark.parametrize("steps", [0, -3, 1.5, True, "10"])
def test_other_than_a_number_of_steps_is_refused(steps):
    with pytest.raises(ConfigError, match="steps is "):
        make_config({"steps": steps})


@pytest.mark.parametrize("other", [{"sparsity": 0.99}, {"rampup_step": 10}])
def test_a_second_choice_of_the_sparsity_is_refused(other):
    with pytest.raises(ConfigError, match=rf"chooses the sparsity: give steps or {next(iter(other))}, not both"):
        make_config({"steps": 100, **other})


@pytest.mark.parametrize("name", ["topk", "onebit", "qsgd"])
def test_other_compressors_say_who_takes_the_number_of_steps(name):
    with pytest.raises(TypeError, match=r"'steps'; only Compression\.dgc chooses the sparsity from it; valid options"):
        make_config({"steps": 100}, algorithm=name)


@pytest.mark.parametrize(("steps", "density"), [(10, 0.05), (2000, 0.05), (5000, 0.02), (10**6, ADAPTIVE_FLOOR)])
def test_an_adaptive_optimizer_gets_a_density_of_its_own(steps, density):
    config = make_config({"steps": steps})
    assert config.suited(False) == config
    assert not config.masks
    suited = config.suited(True)
    assert suited.sparsity == (pytest.approx(max(0, 1 - 3 * density)), pytest.approx(1 - density))
    schedule = Schedule(suited.sparsity, length=suited.rampup_step)
    if steps > 100:
        assert [schedule.density(int(share * steps)) == schedule.density(steps) for share in (0, 0.19, 0.21)] == [
            False,
            False,
            True,
        ]
    assert config.suited(True).masks
    assert [config.least_beta2(int(share * steps)) for share in (0, 0.29, 0.3, 1)] == [0.0, 0.0, 0.99, 0.99]
    assert make_config({}).least_beta2(10**6) == 0
    assert not make_config({"steps": steps, "momentum_masking": False}).suited(True).masks
    assert make_config({"steps": steps, "momentum_masking": True}).masks
    assert make_config({"sparsity": 0.9}).suited(True).sparsity == (0.9,)


def test_values_take_four_bits_with_steps_and_an_adaptive_optimizer_alone():
    def codecs(**options):
        config = make_config(options)
        return config.suited(False).value_codec, config.suited(True).value_codec

    assert codecs() == codecs(sparsity=0.99) == ("int2", "int2")
    assert codecs(steps=100) == ("int2", "int4")
    assert codecs(steps=100, values="int2") == ("int2", "int2")
    assert codecs(steps=100, values="float16") == ("float16", "float16")


def test_few_entries_without_a_number_of_steps_are_thin():
    assert make_config({}).is_thin
    assert make_config({"sparsity": [0.5, 0.99], "rampup_step": 10}).is_thin
    assert not make_config({"sparsity": 0.95}).is_thin
    assert not make_config({"steps": 10**6}).is_thin
    assert not make_config({}, algorithm="topk").is_thin


def test_schedule_is_paddles_table():
    five = (0.75, 0.9375, 0.984375, 0.996, 0.999)
    schedule = Schedule(five, begin=0, length=100)
    expected = [five[min(step // 20, 4)] for step in range(120)]
    assert [round(1 - schedule.density(step), 9) for step in range(120)] == [round(s, 9) for s in expected]
    one_each = Schedule(five, begin=3, length=5)
    assert [one_each.density(s) for s in range(3)] == [1, 1, 1]
    assert [round(1 - one_each.density(3 + s), 9) for s in range(7)] == [*(round(s, 9) for s in five), 0.999, 0.999]
    assert one_each.ramp_end() == 7
    assert (schedule.selects_from(), one_each.selects_from()) == (0, 3)
    for zeros, length, begin in itertools.product((0, 1, 3), (1, 7, 10), (0, 5)):
        late = Schedule((0.0,) * zeros + (0.5, 0.9), begin=begin, length=length)
        assert late.selects_from() == next(s for s in range(99) if late.density(s) < 1)
    assert Schedule((0.0,), begin=3).selects_from() is None
    jump = Schedule((0.5, 0.9), begin=0, length=1)
    assert (jump.density(0), round(jump.density(1), 9)) == (0.5, 0.1)


def test_k_is_what_a_reader_computes_by_hand():
    assert entries_to_send(1000, 1 - 0.999) == 1
    assert entries_to_send(1000, 1 - 0.9) == 100
    assert entries_to_send(2000, 1 - 0.999) == 2
    assert entries_to_send(10, 0.001) == 1
    assert entries_to_send(0, 0.5) == 0
    assert entries_to_send(7, 1.0) == 7
