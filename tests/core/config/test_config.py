"""Options: what is refused, and what counts as a number."""

from __future__ import annotations

import numpy as np
import pytest
from exchange_tools import (
    errors_of,
    make_exchange,
)

from dgc.core.compressors import make_config
from dgc.errors import ConfigError


@pytest.mark.parametrize(
    "options",
    [
        {"sparsity": 1.0},
        {"sparsity": -0.1},
        {"sparsity": []},
        {"sparsity": "0.9"},
        {"momentum": 1.5},
        {"weight_decay": -1},
        {"rampup_begin_step": -1},
        {"rampup_step": 0},
        {"clip_scope": "layer"},
        {"local_grad_clip_norm": 0},
        {"op": "adasum"},
        {"indices": "int7"},
        {"values": "float1"},
        {"momentum": 0, "nesterov": True},
        {"seed": -1},
        {"bucket_bytes": 0},
        {"momentum": True},
        {"momentum": np.zeros(2)},
        {"momentum": 10**400},
        {"sparsity": 10**400},
        {"sparsity": np.zeros((2, 2))},
        {"nesterov": 1},
        {"momentum_masking": "no"},
        {"error_feedback": 0},
        {"exclude": 3},
        {"include": np.zeros(3)},
        {"values": ["float16"]},
        {"min_numel": np.float32(3)},
    ],
    ids=str,
)
def test_bad_options_are_refused(options):
    def rank(transport):
        make_exchange(transport, **options)

    assert all(isinstance(e, ConfigError) for e in errors_of(1, rank))


def test_numpy_numbers_are_numbers():
    given = make_config(
        {"sparsity": np.array([0.75, 0.5]), "momentum": np.float64(0.5), "min_numel": np.int64(7), "nesterov": np.True_}
    )
    assert (
        given.describe()
        == make_config({"sparsity": (0.75, 0.5), "momentum": 0.5, "min_numel": 7, "nesterov": True}).describe()
    )
    assert type(given.min_numel) is int


def test_an_unknown_option_names_the_valid_ones():
    with pytest.raises(TypeError, match="sparsity"):
        make_config({"sparcity": 0.9})
