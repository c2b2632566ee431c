"""What an optimizer holds beside a momentum of the compressor's own."""

import warnings

import keras
import pytest
import tf_keras

from dgc.core.compressors import make_config
from dgc.errors import ConfigError
from dgc.tensorflow.adoption import Adoption, optimizer_variables

TWICE = {
    "keras Adam": keras.optimizers.Adam,
    "keras Lion": keras.optimizers.Lion,
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
    "tf_keras Adam": tf_keras.optimizers.Adam,
}
ONCE = {
    "keras Adam without": lambda: keras.optimizers.Adam(beta_1=0.0),
    "tf_keras Adam without": lambda: tf_keras.optimizers.Adam(beta_1=0.0),
    "keras SGD": lambda: keras.optimizers.SGD(0.1),
    "keras RMSprop": keras.optimizers.RMSprop,
    "none": lambda: None,
}


@pytest.mark.parametrize("kind", TWICE)
def test_a_first_moment_behind_the_compressors_momentum_is_told(kind):
    with pytest.warns(RuntimeWarning, match=r"smooths .* once more, by beta1=0\.9.*leave momentum out"):
        Adoption(TWICE[kind](), make_config({"momentum": 0.9}, algorithm="dgc"))


def test_variables_of_an_optimizer_that_is_not_supported_are_refused_by_its_name():
    with pytest.raises(ConfigError, match=r"tf_keras\.optimizers\.legacy\.SGD is not supported"):
        optimizer_variables(tf_keras.optimizers.legacy.SGD())


@pytest.mark.parametrize("kind", ONCE)
def test_one_smoothing_is_not_told(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Adoption(ONCE[kind](), make_config({"momentum": 0.9}, algorithm="dgc"))


@pytest.mark.parametrize("kind", TWICE)
def test_plain_error_feedback_before_adam_is_not_told(kind):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*smooths what comes out")
        for options in ({}, {"momentum": 0.0}):
            Adoption(TWICE[kind](), make_config(options, algorithm="dgc"))
