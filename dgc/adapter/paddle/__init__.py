"""What ``DGCMomentum`` is in every framework: Paddle's arguments, the flow of its construction, its state."""

from dgc.adapter.paddle.flow import as_state_error, coefficients, config_for, sparse_refusal
from dgc.adapter.paddle.methods import ExchangeMethods
from dgc.adapter.paddle.options import (
    CODEC_OPTIONS,
    COMPRESSED_TYPES,
    MIN_NUMEL,
    ArgumentError,
    PaddleOptions,
    StateError,
    check_regularizer,
    require_parameters,
)
from dgc.adapter.paddle.regularizers import L1Decay, L1DecayRegularizer, L2Decay, L2DecayRegularizer, Regularizer
from dgc.adapter.paddle.state import BUFFERS, checked_buffer, require_keys

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
