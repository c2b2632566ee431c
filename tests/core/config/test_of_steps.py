"""The schedule that follows from a training's number of steps."""

import numpy as np
import pytest

from dgc.core.compressors import make_config
from dgc.errors import ConfigError


@pytest.mark.parametrize(("steps", "density"), [(1, 1 / 64), (6400, 1 / 64), (10_000, 0.01), (10**6, 0.001)])
def test_each_entry_is_sent_a_hundred_times(steps, density):
    config = make_config({"steps": steps, "momentum": 0.9})
    assert config.sparsity == (pytest.approx(1 - density),)
    assert (config.momentum, config.momentum_masking) == (0.9, False)


def test_what_is_given_beside_it_stays():
    config = make_config({"steps": 1000, "values": "float16", "momentum_masking": True})
    assert config.values == "float16"
    assert config.momentum_masking


@pytest.mark.parametrize("steps", [np.int64(500), None])
def test_numpy_integers_and_none_are_taken(steps):
    assert make_config({"steps": steps}).sparsity == (1 - 1 / 64 if steps else 0.999,)


@pytest.mark.parametrize("steps", [0, -3, 1.5, True, "10"])
def test_other_than_a_number_of_steps_is_refused(steps):
    with pytest.raises(ConfigError, match="steps is "):
        make_config({"steps": steps})


@pytest.mark.parametrize("other", [{"sparsity": 0.99}, {"rampup_step": 10}])
def test_a_second_choice_of_the_sparsity_is_refused(other):
    with pytest.raises(ConfigError, match=rf"steps=100 chooses the sparsity: leave {next(iter(other))} out, or steps"):
        make_config({"steps": 100, **other})


def test_others_than_dgc_have_no_such_option():
    with pytest.raises(TypeError, match="unknown option 'steps'"):
        make_config({"steps": 100}, algorithm="qsgd")
