"""What ``DGCMomentum`` is in every framework: Paddle's arguments, its regularizers, its state."""

from dgc.adapter.paddle.methods import ExchangeMethods
from dgc.adapter.paddle.options import (
    CODEC_OPTIONS,
    COMPRESSED_TYPES,
    MIN_NUMEL,
    PaddleOptions,
    config_for,
    require_parameters,
    sparse_refusal,
)
from dgc.adapter.paddle.regularizers import (
    ArgumentError,
    L1Decay,
    L1DecayRegularizer,
    L2Decay,
    L2DecayRegularizer,
    Regularizer,
    check_regularizer,
    coefficients,
)
from dgc.adapter.paddle.state import BUFFERS, StateError, as_state_error, checked_buffer, require_keys

__all__ = [
    "BUFFERS",
    "CODEC_OPTIONS",
    "COMPRESSED_TYPES",
    "MIN_NUMEL",
    "ArgumentError",
    "ExchangeMethods",
    "L1Decay",
    "L1DecayRegularizer",
    "L2Decay",
    "L2DecayRegularizer",
    "PaddleOptions",
    "Regularizer",
    "StateError",
    "as_state_error",
    "check_regularizer",
    "checked_buffer",
    "coefficients",
    "config_for",
    "require_keys",
    "require_parameters",
    "sparse_refusal",
]
