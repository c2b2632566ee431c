"""The parts of Paddle's ``DGCMomentum`` that all frameworks share: arguments, regularizers, errors and state.

Source: PaddlePaddle 1.6, ``fluid.optimizer.DGCMomentumOptimizer``.
"""

from __future__ import annotations

import contextlib
import glob
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from dgc.core.checks import plain, require_flag
from dgc.core.compressors import make_config
from dgc.core.config import DGCConfig
from dgc.core.layout import Parameter
from dgc.errors import ConfigError, LayoutError

__all__ = ["L1Decay", "L1DecayRegularizer", "L2Decay", "L2DecayRegularizer"]

# Paddle compresses tensors of at least this many elements, and of these types.
MIN_NUMEL = 16384
COMPRESSED_TYPES = ("float32",)

# Options of the core that DGCMomentum accepts in addition to Paddle's arguments.
CODEC_OPTIONS = ("indices", "values", "small", "bucket_bytes", "momentum_masking")

NEVER = 2**62  # a first compressed step that no training reaches


class ArgumentError(ConfigError, AssertionError):
    """An argument that Paddle refuses with an ``AssertionError``."""


class StateError(LayoutError, AssertionError):
    """A state dict does not fit. Paddle refuses it with an ``AssertionError``."""


def require(condition: bool, message: str) -> None:
    """Raise an ArgumentError unless the condition holds."""
    if not condition:
        raise ArgumentError(message)


@dataclass(frozen=True)
class L1Decay:
    """Adds ``regularization_coeff * sign(p)`` to each rank's gradient, after clipping and before momentum."""

    regularization_coeff: float = 0.0


@dataclass(frozen=True)
class L2Decay:
    """Adds ``regularization_coeff * p`` to each rank's gradient, after clipping and before momentum."""

    regularization_coeff: float = 0.0


L1DecayRegularizer = L1Decay
L2DecayRegularizer = L2Decay

Regularizer = L1Decay | L2Decay | None


def coefficient(regularizer: Any, what: str = "regularization") -> float:
    """Return the coefficient of a regularizer, 0 for None; raise an error if it is wrong. ``what`` names it."""
    if regularizer is None:
        return 0.0
    require(
        isinstance(regularizer, (L1Decay, L2Decay)),
        f"{what} is {regularizer!r}; allowed: None, L1Decay(coefficient) or L2Decay(coefficient)",
    )
    value = regularizer.regularization_coeff
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    require(
        number and math.isfinite(value) and value >= 0,
        f"{what} has the coefficient {value!r}; allowed: a number >= 0",
    )
    return float(value)


@dataclass(frozen=True)
class PaddleOptions:
    """The checked arguments of ``DGCMomentum``.

    Three of them do not exist in Paddle: ``dtypes`` (the types that are compressed), ``exclude`` (name patterns of
    tensors that are never compressed) and ``codecs`` (values of :data:`CODEC_OPTIONS`).
    """

    learning_rate: Any
    momentum: float
    rampup_begin_step: int
    rampup_step: int = 1
    sparsity: Sequence[float] = (0.999,)
    use_nesterov: bool = False
    local_grad_clip_norm: float | None = None
    num_trainers: int | None = None
    regularization: Regularizer = None
    name: str | None = None
    min_numel: int = MIN_NUMEL
    dtypes: Sequence[str] = COMPRESSED_TYPES
    exclude: str | Sequence[str] = ()
    codecs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check everything that can be checked without other ranks.

        Raises:
            ArgumentError: (an AssertionError and a ValueError) a value is wrong, and Paddle would raise AssertionError.
            ConfigError: (a ValueError) another value is out of range.
            TypeError: ``rampup_begin_step`` is missing, or ``codecs`` has an unknown option.
        """
        for option in fields(self):
            object.__setattr__(self, option.name, plain(getattr(self, option.name)))
        object.__setattr__(self, "exclude", (self.exclude,) if isinstance(self.exclude, str) else tuple(self.exclude))
        if isinstance(self.learning_rate, int) and not isinstance(self.learning_rate, bool):
            object.__setattr__(self, "learning_rate", float(self.learning_rate))
        require_flag("use_nesterov", self.use_nesterov)
        rate, begin, ranks = self.learning_rate, self.rampup_begin_step, self.num_trainers
        require(rate is not None, "learning_rate is None; give the step size, such as 0.1")
        if isinstance(rate, (bool, str)) or (isinstance(rate, float) and not (math.isfinite(rate) and rate >= 0)):
            raise ConfigError(f"learning_rate is {rate!r}; allowed: a finite number >= 0, or a schedule in TensorFlow")
        require(self.momentum is not None, "momentum is None; give the momentum factor, such as 0.9")
        if begin is None:
            raise TypeError("rampup_begin_step is missing: the first step that is compressed, such as 0")
        require(isinstance(begin, int) and begin >= 0, f"rampup_begin_step is {begin!r}; allowed: a whole number >= 0")
        if (clip := self.local_grad_clip_norm) is not None:
            require(
                type(ranks) is int and ranks > 0,
                f"num_trainers is {ranks!r}; with local_grad_clip_norm it must be the number of ranks, an int > 0",
            )
            require(
                isinstance(clip, float) and math.isfinite(clip) and clip > 0,
                f"local_grad_clip_norm is {clip!r}; allowed: a float > 0, such as 1.0",
            )
        self.to_config([])

    def core_options(self, parameters: Sequence[Parameter]) -> dict[str, Any]:
        """Return the options, except momentum and decay, that make ``Compression.dgc`` do what Paddle does.

        The core compresses no 1-D tensors and ignores types. Paddle's rules for both become name patterns.
        """
        if unknown := [name for name in self.codecs if name not in CODEC_OPTIONS]:
            raise TypeError(
                f"DGCMomentum got an unknown option {unknown[0]!r}; it takes the arguments of Paddle 1.6 and "
                f"{', '.join(CODEC_OPTIONS)}. docs/elsewhere.md says what replaces those of other versions"
            )
        large = [p for p in parameters if p.numel >= max(1, self.min_numel)]
        return dict(
            rampup_begin_step=self.rampup_begin_step,
            rampup_step=self.rampup_step,
            sparsity=self.sparsity,
            local_grad_clip_norm=self.local_grad_clip_norm,
            min_numel=self.min_numel,
            include=tuple(glob.escape(p.name) for p in large if p.dtype in self.dtypes and len(p.shape) <= 1),
            exclude=(*self.exclude, *(glob.escape(p.name) for p in large if p.dtype not in self.dtypes)),
            # Paddle sends values as float32, and every rank receives the messages of all others.
            exchange="gather",
            **{"values": "float32", "small": "float32", **self.codecs},
        )

    def to_config(self, parameters: Sequence[Parameter]) -> DGCConfig:
        """Return the config with which the core treats these parameters as Paddle does."""
        decay = coefficient(self.regularization)
        own = dict(momentum=self.momentum, nesterov=self.use_nesterov, weight_decay=decay)
        return make_config({**own, **self.core_options(parameters)}, owner="DGCMomentum")

    def check_ranks(self, ranks: int) -> None:
        """Require that ``num_trainers`` is the job's number of ranks."""
        require(
            self.num_trainers in (None, ranks),
            f"num_trainers is {self.num_trainers}, but {ranks} ranks train; give {ranks}, or leave it out "
            "without clipping",
        )


def one_rate(learning_rate: Any, lr: Any) -> Any:
    """Return the learning rate, which may be given under either of two names."""
    if learning_rate is not None and lr is not None:
        raise ConfigError("learning_rate and lr mean the same; give one of them")
    return learning_rate if lr is None else lr


def warn_of_one_process() -> None:
    """Warn about one process. Paddle raises "DGC is not useful"; a warning lets users try a script on one process."""
    warnings.warn("DGCMomentum with one process compresses nothing", RuntimeWarning, stacklevel=4)


def warn_of_kept_residuals() -> None:
    """Warn that one process has loaded gradients that several ranks had not sent."""
    warnings.warn(
        "one process sends nothing, so the loaded residuals move no parameter; they stay in state_dict()",
        RuntimeWarning,
        stacklevel=3,
    )


@contextlib.contextmanager
def as_state_error() -> Iterator[None]:
    """Turn a LayoutError about a state into a StateError."""
    try:
        yield
    except LayoutError as error:
        raise StateError(str(error)) from error


def require_keys(saved: Mapping[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        if key not in saved:
            raise StateError(f"the state has no {key!r}; it was not made by DGCMomentum's state_dict()")
