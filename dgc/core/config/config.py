"""Options of a compressor: one frozen, validated dataclass, the same for every framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dgc.core.config.checks import plain, require_choice, require_flag, require_integer, require_number
from dgc.errors import ConfigError

DEFAULT_BUCKET_BYTES = 25 * 2**20
"""Dense gradient bytes (as float32) per bucket."""


@dataclass(frozen=True, kw_only=True)
class DGCConfig:
    """Everything that changes the mathematics or the bytes of an exchange.

    All ranks must hold equal values; :func:`DGCConfig.describe` is what they compare.
    """

    # Momentum correction. None means "adopt it from the optimizer, else 0".
    momentum: float | None = None
    nesterov: bool | None = None
    # Added to the local gradient before accumulation. None means "adopt it from the optimizer, else 0".
    weight_decay: float | None = None
    # Set the momentum buffer to 0 where an entry was sent, unless all are (momentum factor masking).
    momentum_masking: bool = True
    # Share of entries held back, one value or one per equal part of the ramp-up.
    sparsity: tuple[float, ...] = (0.999,)
    # First step that is sparsified; everything before it is dense.
    rampup_begin_step: int = 0
    # Steps over which the list of sparsities is walked through.
    rampup_step: int = 1
    # The paper's threshold c: a local gradient g is scaled to at most c * sqrt(P) in L2 norm. None: no clipping.
    local_grad_clip_norm: float | None = None
    # "tensor": one norm per sparsified tensor; "global": one norm over all gradients, from the first step.
    clip_scope: str = "tensor"
    # Tensors with fewer elements are sent dense.
    min_numel: int = 1024
    # Name patterns (fnmatch) of tensors that are sparsified whatever their shape / that are always sent dense.
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    # Codecs of the message, by their names in the registry: see docs/wire-format.md.
    indices: str = "elias_fano"
    values: str = "int2"
    # How tensors that are dense because of their shape or size are sent beside sparsified ones: a value codec's name.
    small: str = "int3"
    # Dense float32 bytes per bucket.
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    # "average" or "sum" over the ranks.
    op: str = "average"
    # Seed of the counter-based random numbers of stochastic compressors.
    seed: int = 0
    # "sparse": as the compressor says. "dense": nothing is compressed. "auto": whichever is predicted to be faster.
    exchange: str = "sparse"
    # Add gradients up within a node first, whose ranks then send as one: False, True, "auto" (where it saves traffic),
    # or how many neighbouring ranks form a group.
    hierarchical: bool | int | str = False
    # Keep copies of u and v, so that a step that was exchanged can be taken back wholly instead of being applied.
    discardable: bool = False
    # Apply received entries to the parameters without a dense result, where the optimizer's update allows that.
    sparse_updates: bool = True
    # False drops what is not sent (a control experiment: accuracy collapses).
    error_feedback: bool = field(default=True, repr=False)
    # Which compressor, by its name in the registry, and the options that it alone has.
    algorithm: str = "dgc"
    own: Any = None

    def __post_init__(self) -> None:
        """Normalise sequences to tuples and refuse what is out of range.

        Raises:
            ConfigError: an option is out of range; the message says what is allowed.
        """
        set_ = object.__setattr__
        for option in dataclasses.fields(self):
            set_(self, option.name, plain(getattr(self, option.name)))
        set_(self, "sparsity", _sparsities(self.sparsity))
        for name in ("include", "exclude"):
            set_(self, name, _patterns(name, getattr(self, name)))
        require_number("momentum", self.momentum, low=0.0, high=1.0, high_open=True, optional=True)
        require_number("weight_decay", self.weight_decay, low=0.0, optional=True)
        require_number("local_grad_clip_norm", self.local_grad_clip_norm, low=0.0, low_open=True, optional=True)
        require_integer("rampup_begin_step", self.rampup_begin_step, 0)
        require_integer("rampup_step", self.rampup_step, 1)
        require_integer("min_numel", self.min_numel, 0)
        require_integer("bucket_bytes", self.bucket_bytes, 1)
        require_integer("seed", self.seed, 0)
        require_flag("momentum_masking", self.momentum_masking)
        require_flag("error_feedback", self.error_feedback)
        require_flag("discardable", self.discardable)
        require_flag("sparse_updates", self.sparse_updates)
        require_choice("clip_scope", self.clip_scope, ("tensor", "global"))
        require_choice("op", self.op, ("average", "sum"))
        require_choice("exchange", self.exchange, ("sparse", "dense", "auto"))
        if not isinstance(self.hierarchical, bool) and self.hierarchical != "auto":
            if isinstance(self.hierarchical, str):
                raise ConfigError(
                    f"hierarchical is {self.hierarchical!r}; give True, False, 'auto' or a number of ranks"
                )
            require_integer("hierarchical", self.hierarchical, 2)
        if self.exchange == "dense" and self.clips_tensors:
            raise ConfigError(
                "exchange='dense' clips no single tensors: give clip_scope='global' or leave local_grad_clip_norm out"
            )
        if self.nesterov is not None and not isinstance(self.nesterov, bool):
            raise ConfigError(f"nesterov is {self.nesterov!r}; give True, False or None (adopt it from the optimizer)")
        if self.nesterov and self.momentum == 0:
            raise ConfigError("nesterov=True needs momentum > 0; give a momentum, or leave nesterov out")

    @property
    def clips_tensors(self) -> bool:
        """Whether each sparsified tensor is clipped by its own norm, which dense ones are not."""
        return self.local_grad_clip_norm is not None and self.clip_scope == "tensor"

    def own_share(self, ranks: int) -> float:
        """What part of a reduced gradient is one rank's own: 1 of an average, 1 / P of a sum."""
        return 1.0 / ranks if self.op == "sum" else 1.0

    def describe(self) -> dict[str, Any]:
        """Return the options as a mapping of plain values, in a fixed order, for the ranks to compare."""
        options = {"algorithm": self.algorithm, **dataclasses.asdict(self)}  # on which the other defaults depend
        return {name: list(v) if isinstance(v, tuple) else v for name, v in options.items()}


def _sparsities(value: object) -> tuple[float, ...]:
    value = value.tolist() if isinstance(value, np.ndarray) else value
    values = (value,) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) == 0:
        raise ConfigError(f"sparsity is {value!r}; give a number in [0, 1) or a non-empty list of such numbers")
    for s in values:
        if isinstance(s, bool) or not isinstance(s, (int, float)) or not 0.0 <= s < 1.0:
            raise ConfigError(
                f"sparsity contains {s!r}; each must be in [0, 1): 0.999 holds back 99.9 % and sends 0.1 % of it"
            )
    return tuple(float(s) for s in values)


def _patterns(name: str, value: object) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not all(isinstance(p, str) for p in values):
        raise ConfigError(f"{name} is {value!r}; give name patterns such as ('*.bias', 'embedding.*')")
    return tuple(values)
