"""What a compressor is in every framework: options, the bound engine, its state and its statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from dgc.core.compressors.build import make_config, make_wrapper_config
from dgc.core.config.composite import WRAPPERS
from dgc.core.config.config import DGCConfig
from dgc.core.exchange.exchange import Exchange
from dgc.core.exchange.records import Stats
from dgc.core.state.state import resized
from dgc.core.transport import Transport
from dgc.errors import ConfigError, LayoutError
from dgc.transport.agreement import agree_or_raise

ADAPTER_OPTIONS = ("transport", "loss_scale", "process_set")
"""Options that concern one rank's surroundings, not the mathematics that all ranks must share."""

INACTIVE = {"inactive": True, "rank": 0, "size": 1}
"""The state of a compressor in a job of one process, which exchanges nothing."""


class BoundEngine(Protocol):
    """What an adapter's engine offers to :class:`CompressorBase`."""

    transport: Transport

    @property
    def stats(self) -> Stats: ...  # noqa: D102

    @property
    def exchange(self) -> Exchange: ...  # noqa: D102

    def residual_norm(self) -> float: ...  # noqa: D102

    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102

    def load_state_dict(self, saved: dict[str, Any]) -> None: ...  # noqa: D102

    def reset(self) -> None: ...  # noqa: D102

    def discard_step(self) -> bool: ...  # noqa: D102

    def abandon(self) -> None: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


class CompressorBase:
    """Options and state of one compressor; an adapter adds how it meets its framework.

    Attributes:
        config: the validated options.
    """

    def __init__(self, options: dict[str, Any], ops: Any, algorithm: str = "dgc", members: Any = None) -> None:
        """Check the options.

        Args:
            options: keyword options of ``Compression.dgc``, or of the compressor that ``algorithm`` names.
            ops: has Horovod's reduce ops ``Average`` and ``Sum`` as attributes; only asked when ``op`` is not a name.
            algorithm: the compressor's name in the registry, or that of a wrapper.
            members: of a wrapper: key -> compressor or None.

        Raises:
            TypeError: an option is unknown.
            ConfigError: an option is out of range.
        """
        self.given_options = dict(options) if members is None else {**options, "members": members}
        options = dict(options)
        self._adapter = {name: options.pop(name) for name in ADAPTER_OPTIONS if name in options}
        self._ops = ops
        self._op_was_given = "op" in options
        options["op"] = op_name(options.get("op", "average"), ops)
        try:
            self.config: DGCConfig = (
                make_wrapper_config(algorithm, members, options)
                if algorithm in WRAPPERS
                else make_config(options, algorithm=algorithm)
            )
        except TypeError as error:
            raise TypeError(f"{error}, {', '.join(ADAPTER_OPTIONS)}") from None
        self._engine: Any = None

    def use_op(self, op: Any) -> None:
        """Take the reduce op of the wrapper that is about to bind this compressor.

        Raises:
            ConfigError: the compressor was given another one, or it is neither Average nor Sum.
        """
        name = op_name(op, self._ops)
        if self._op_was_given and name != self.config.op:
            raise ConfigError(
                f"the compressor was told op={self.config.op}, the optimizer op={name}; pass the same to both, or "
                "leave it out of the compressor"
            )
        self.config = dataclasses.replace(self.config, op=name)

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Bytes sent and received, dense bytes, ratio, density and seconds, of the last step and in total."""
        return self._engine.stats if self._engine is not None else Stats()

    @property
    def residual_norm(self) -> float:
        """L2 norm of what this rank has not sent yet."""
        return self._engine.residual_norm() if self._engine is not None else 0.0

    def describe(self) -> dict[str, Any]:
        """What the compressor is doing, for a log: step, density, end of the ramp-up, shares, buckets, transport.

        Empty with one process or outside the process set, where nothing is compressed.
        """
        return self._engine.exchange.describe() if self._engine is not None else {}

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: residuals, momentum buffers and step. It differs between ranks; never broadcast it.

        Raises:
            LayoutError: called in the middle of a step.
        """
        return self._engine.state_dict() if self._engine is not None else dict(INACTIVE)

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]], resize: bool = False) -> None:
        """Continue from a saved state; call it on all ranks.

        Args:
            state: what :meth:`state_dict` returned on this rank; with ``resize=True`` a list of all old ranks' states.
            resize: redistribute the residuals of N old ranks to this job's M ranks, so that their mean is kept.

        Raises:
            LayoutError: the state belongs to another model, rank or number of ranks, on this rank or another, or the
                ranks' states are of different steps.
        """
        if self._engine is not None:
            self._engine.abandon()  # the transport belongs to a step until it is over
            advice = "Load a state on every rank, each its own."
            agree_or_raise(self._engine.transport, lambda: self._load(state, resize), "states", LayoutError, advice)

    def _load(self, state: Any, resize: bool) -> dict[str, Any]:
        """Take over a state without asking anybody.

        Returns:
            What all ranks must have in common.
        """
        if not resize:
            if not isinstance(state, dict):
                raise LayoutError(f"load_state_dict got {len(state)} states; pass this rank's own, or resize=True")
            if state.get("inactive"):
                raise LayoutError(
                    "the saved compressor state is one of a single process, which keeps none; do not load it, or pass "
                    "resize=True to start with empty residuals"
                )
            self._engine.load_state_dict(state)
            return {"step": state["step"]}
        states = [state] if isinstance(state, dict) else list(state)
        transport = self._engine.transport
        if states[0].get("inactive"):
            self._engine.reset()
            return {"step": 0}
        if len(states) != states[0]["size"]:
            raise LayoutError(
                f"resize=True needs the states of all {states[0]['size']} old ranks in rank order, got {len(states)}"
            )
        own = resized(states, transport.rank, transport.size, self.config.rampup_begin_step)
        self._engine.load_state_dict({**own, "rank": transport.rank, "size": transport.size})
        return {"step": own["step"]}

    def discard_step(self) -> bool:
        """Take back the latest step, which was exchanged and shall not be applied; call it on all ranks.

        Residuals, momentum, the selection's thresholds, the step and so the schedule are then what they were before it,
        bit for bit. Call it between the exchange and the update: what TensorFlow's optimizer has applied is not known
        here. A rank that discards alone is an error on all ranks in the next step.

        Returns:
            False when there is nothing to take back: no step so far, a refused, applied or discarded one, or a job of
            one process.

        Raises:
            ConfigError: the compressor was made without ``discardable=True``.
            LayoutError: called in the middle of a step.
        """
        if not self.config.discardable:
            raise ConfigError(
                "discard_step() needs copies of momentum and residuals, which are not kept unasked: give "
                f"Compression.{self.config.algorithm}(..., discardable=True)"
            )
        return self._engine.discard_step() if self._engine is not None else False

    def reset(self) -> None:
        """Forget residuals, momentum buffers, the step and the statistics; call it on all ranks."""
        if self._engine is not None:
            self._engine.reset()

    def close(self) -> None:
        """End the communication threads and free the communicator."""
        if self._engine is not None:
            self._engine.close()


def check_stand_in(value: float, *, op: str, size: int) -> None:
    """Look at what Horovod made of a 1.0 from every rank: it betrays another op, and ranks that have joined.

    Args:
        value: the reduced stand-in.
        op: "average" or "sum", what the compressor was told.
        size: number of ranks.

    Raises:
        ConfigError: Horovod does something else than the compressor.
    """
    expected = float(size) if op == "sum" else 1.0
    if abs(value - expected) < 1e-3:
        return
    if op == "average" and abs(value - size) < 1e-3:
        raise ConfigError(
            "Horovod sums the gradients (op=hvd.Sum) but the compressor averages; pass the same op to both: "
            "Compression.dgc(..., op=hvd.Sum)"
        )
    if op == "sum" and abs(value - 1.0) < 1e-3:
        raise ConfigError("the compressor was told op=Sum but Horovod averages the gradients; pass op=hvd.Sum to both")
    raise ConfigError(
        f"the ranks' stand-ins reduced to {value:g} instead of {expected:g}: a rank has joined (hvd.join), or the op "
        "is not one the compressor supports; give every rank the same number of batches (repeat or drop some) instead "
        "of hvd.join()"
    )


def op_name(op: Any, ops: Any) -> str:
    """Horovod's reduce op, or its name, as the core calls it.

    Raises:
        ConfigError: neither Average nor Sum.
    """
    if isinstance(op, str):
        return op.lower()
    if op == ops.Average:
        return "average"
    if op == ops.Sum:
        return "sum"
    raise ConfigError(f"op is {op!r}; gradient compression supports hvd.Average and hvd.Sum (not Adasum)")
