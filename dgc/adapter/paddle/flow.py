"""Steps on the way from Paddle's arguments to an engine, and from its errors to Paddle's."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Final

from dgc.adapter.paddle.options import PaddleOptions, StateError
from dgc.adapter.paddle.regularizers import L1Decay, Regularizer
from dgc.core.config.config import DGCConfig
from dgc.core.state.layout import Parameter, travels_dense
from dgc.errors import ConfigError, LayoutError

_NEVER: Final = 2**62
"""A first compressed step that no run reaches."""


def config_for(options: PaddleOptions, parameters: Sequence[Parameter], ranks: int) -> tuple[DGCConfig, set[int]]:
    """The core's options for these parameters in a job of ``ranks`` processes, and which of them it compresses.

    One process compresses nothing, whatever the step. Paddle refuses to run then; here a script can be tried out
    without a launcher.

    Returns:
        The options, and the places of the parameters that are compressed once the ramp-up has begun.

    Warns:
        RuntimeWarning: there is one process.
    """
    config = options.to_config(parameters)
    compressed = {i for i, parameter in enumerate(parameters) if not travels_dense(parameter, config)}
    if ranks == 1:
        warnings.warn("DGCMomentum with one process compresses nothing", RuntimeWarning, stacklevel=3)
        config = dataclasses.replace(config, rampup_begin_step=_NEVER)
    return config, compressed


def coefficients(regularizer: Regularizer) -> tuple[float, float]:
    """(L1, L2) coefficients, of which one at most is not 0."""
    coefficient = 0.0 if regularizer is None else float(regularizer.regularization_coeff)
    return (coefficient, 0.0) if isinstance(regularizer, L1Decay) else (0.0, coefficient)


def sparse_refusal(name: str, advice: str = "") -> ConfigError:
    """The error about a sparse gradient of a compressed parameter."""
    return ConfigError(
        f"{name!r} has sparse gradients, which are not compressed: add its name to exclude=, so that it travels "
        f"dense{advice}"
    )


@contextlib.contextmanager
def as_state_error() -> Iterator[None]:
    """Turn a state that the core refuses into Paddle's kind of error.

    Raises:
        StateError: (an AssertionError and a ValueError) for a LayoutError inside.
    """
    try:
        yield
    except StateError:
        raise
    except LayoutError as error:
        raise StateError(str(error)) from error
