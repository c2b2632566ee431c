"""Paddle's arguments without a framework: its schedule, its k, its eligibility, its errors."""

import pytest

from dgc.contrib.paddle import ArgumentError, L1Decay, L2Decay, PaddleOptions, coefficient
from dgc.core.layout import Parameter, sent_dense
from dgc.errors import ConfigError


def options(**changes):
    return PaddleOptions(**{"learning_rate": 0.1, "momentum": 0.9, "rampup_begin_step": 0, **changes})


def test_eligibility_is_by_elements_and_type_whatever_the_dimensions():
    parameters = [
        Parameter("just", (16, 1024), "float32"),
        Parameter("short", (127, 129), "float32"),
        Parameter("flat", (16384,), "float32"),
        Parameter("flat[short]", (16383,), "float32"),
        Parameter("half", (200, 200), "float16"),
        Parameter("*", (200, 200), "bfloat16"),
        Parameter("odd[*]?", (20000,), "float32"),
        Parameter("odd_like_x", (200, 200), "float64"),
    ]
    config = options().to_config(parameters)
    assert [p.name for p in parameters if not sent_dense(p, config)] == ["just", "flat", "odd[*]?"]
    config = options(dtypes=("float16", "bfloat16"), min_numel=30_000, exclude=("h*",)).to_config(parameters)
    assert [p.name for p in parameters if not sent_dense(p, config)] == ["*"]


def test_defaults_send_whole_values_with_momentum_factor_masking():
    config = options().to_config([])
    assert (config.sparsity, config.values, config.masks) == ((0.999,), "float32", True)
    assert (config.clip_scope, config.op, config.error_feedback) == ("tensor", "average", "auto")


def test_momentum_options_reach_the_core():
    given = {"use_nesterov": True, "momentum": 0.7, "local_grad_clip_norm": 2.0, "num_trainers": 4, "rampup_step": 9}
    config = options(**given, codecs={"indices": "uint16"}).to_config([])
    assert (config.nesterov, config.momentum, config.local_grad_clip_norm) == (True, 0.7, 2.0)
    assert (config.rampup_step, config.indices) == (9, "uint16")


@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (AssertionError, "learning_rate is None", {"learning_rate": None}),
        (AssertionError, "momentum is None", {"momentum": None}),
        (AssertionError, "rampup_begin_step is -1", {"rampup_begin_step": -1}),
        (AssertionError, "num_trainers is None", {"local_grad_clip_norm": 1.0}),
        (AssertionError, "num_trainers is '2'", {"local_grad_clip_norm": 1.0, "num_trainers": "2"}),
        (AssertionError, "num_trainers is 2.0", {"local_grad_clip_norm": 1.0, "num_trainers": 2.0}),
        (AssertionError, "num_trainers is True", {"local_grad_clip_norm": 1.0, "num_trainers": True}),
        (AssertionError, "num_trainers is 0", {"local_grad_clip_norm": 1.0, "num_trainers": 0}),
        (AssertionError, "local_grad_clip_norm is 1;", {"local_grad_clip_norm": 1, "num_trainers": 2}),
        (AssertionError, "local_grad_clip_norm is -1.0", {"local_grad_clip_norm": -1.0, "num_trainers": 2}),
        (AssertionError, "regularization is 'l2'", {"regularization": "l2"}),
        (AssertionError, "coefficient nan", {"regularization": L1Decay(float("nan"))}),
        (AssertionError, "regularization is 0.1", {"regularization": 0.1}),
        (AssertionError, "coefficient -1", {"regularization": L2Decay(-1)}),
        (ConfigError, "momentum is 1.5", {"momentum": 1.5}),
        (ConfigError, "sparsity contains 1", {"sparsity": [1]}),
        (ConfigError, "sparsity", {"sparsity": []}),
        (ConfigError, "rampup_step is 0", {"rampup_step": 0}),
        (ConfigError, "nesterov", {"use_nesterov": True, "momentum": 0.0}),
        (TypeError, "rampup_begin_step is missing", {"rampup_begin_step": None}),
        (ConfigError, "learning_rate is -0.1", {"learning_rate": -0.1}),
        (ConfigError, "learning_rate is nan", {"learning_rate": float("nan")}),
        (ConfigError, "learning_rate is '0.1'", {"learning_rate": "0.1"}),
        (ConfigError, "use_nesterov is 2", {"use_nesterov": 2}),
        (TypeError, "'grad_clip'; .* docs/elsewhere.md", {"codecs": {"grad_clip": 1.0}}),
        (TypeError, "unknown option 'momentum'", {"codecs": {"momentum": 0.5}}),
    ],
)
def test_bad_arguments(error, match, changes):
    with pytest.raises(error, match=match) as raised:
        options(**changes)
    assert isinstance(raised.value, (ConfigError, TypeError))


def test_num_trainers_must_be_the_number_of_ranks():
    options().check_ranks(3)
    options(num_trainers=3).check_ranks(3)
    with pytest.raises(ArgumentError, match="num_trainers is 4, but 3 ranks train"):
        options(num_trainers=4).check_ranks(3)


def test_regularizers():
    assert coefficient(None) == L1Decay().regularization_coeff == 0.0
    assert coefficient(L2Decay(1)) == 1.0
