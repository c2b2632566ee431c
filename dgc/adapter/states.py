"""States of a compressor as users hand them over: whether they are any, and what one rank makes of those of others.

And what refuses to be a state: an object that is connected to the other ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final, SupportsIndex

import numpy as np

from dgc.core.state import FORMAT, old_ranks_of, resized
from dgc.core.transport import Transport
from dgc.errors import LayoutError

EMPTY: Final[dict[str, Any]] = {"format": FORMAT, "step": 0, "parameters": {}}
"""The state of a compressor that has exchanged nothing; loading it forgets residuals, momentum and step."""

INACTIVE: Final[dict[str, Any]] = {"inactive": True, "rank": 0, "size": 1}
"""The state of a compressor in a job of one process, which exchanges nothing."""

NO_EXCHANGE: Final[dict[str, Any]] = {"density": 1.0, "sparsified_share": 0.0, "transport": "none", "ranks": 1}
"""What a compressor says of itself there."""


def is_empty(state: Mapping[str, Any]) -> bool:
    """Whether a state is one of a compressor that has exchanged nothing, though it had others to exchange with."""
    return not state or ("parameters" in state and not state["parameters"])


def holds_nothing(state: Mapping[str, Any]) -> bool:
    """Whether there is nothing in a state that could be lost: it is empty, or of a single process."""
    return is_empty(state) or bool(state.get("inactive"))


def dense_by_choice(state: Mapping[str, Any]) -> list[str]:
    """Names of the tensors that a sound state says to have been sent dense though the options sparsify them."""
    return [name for name, entry in state.get("parameters", {}).items() if entry.get("exchange") == "dense"]


def require_states(state: object, resize: bool) -> list[Any]:
    """What was given to ``load_state_dict`` as a list of states, of which some may be None.

    Args:
        state: one state; with ``resize`` also the list of all old ranks'.
        resize: as in ``load_state_dict``.

    Raises:
        LayoutError: it is something else, or a list without ``resize``.
    """
    if isinstance(state, Mapping):
        return [state]
    if not isinstance(state, Sequence) or isinstance(state, (str, bytes)):
        shown = "None" if state is None else f"a {type(state).__name__}"
        raise LayoutError(
            f"load_state_dict got {shown}; give it what state_dict() returned on this rank, or {{}} to begin with "
            "empty residuals"
        )
    if not resize or not len(state):
        raise LayoutError(f"load_state_dict got {len(state)} states; pass this rank's own, or resize=True")
    for rank, each in enumerate(state):
        if not isinstance(each, Mapping) and (each is not None or rank == 0):
            raise LayoutError(
                f"load_state_dict got {each if each is None else 'a ' + type(each).__name__} as the state of old rank "
                f"{rank}; give it what state_dict() returned there"
            )
    return list(state)


def own_state(
    states: Sequence[Any], transport: Transport, rampup_begin_step: int, *, op: str = "average"
) -> dict[str, Any]:
    """This rank's share of the states of all ranks of a job of another size.

    Args:
        states: in rank order; None for those that this rank does not need.
        transport: of this job.
        rampup_begin_step: as in :func:`dgc.core.state.resized`.
        op: as in :func:`dgc.core.state.resized`.

    Raises:
        LayoutError: they are not those of all its ranks, of one step and one model.
    """
    first, size = states[0], states[0].get("size")
    if first.get("nodes") is not None:
        raise LayoutError(
            f"the saved compressor states are those of {first['nodes']} nodes (hierarchical=...), which resize=True "
            f"cannot hand to other ranks: load them on {size} ranks of as many nodes, or go on from the model alone"
        )
    if len(states) != size:
        raise LayoutError(f"resize=True needs the states of all {size} old ranks in rank order, got {len(states)}")
    for rank in {0, *old_ranks_of(transport.rank, len(states), transport.size)}:
        _require_alike(first, states[rank], rank)
    own = resized(states, transport.rank, transport.size, rampup_begin_step, op=op)
    return {**own, "rank": transport.rank, "size": transport.size}


def warn_of_dropped(state: Any) -> None:
    """Say what a job of one process does not take over."""
    states = [state] if isinstance(state, Mapping) else [s for s in state if s is not None]
    if not all(holds_nothing(s) for s in states):
        warnings.warn(
            "one process compresses nothing: what the ranks had not sent yet, and their momentum, are dropped",
            RuntimeWarning,
            stacklevel=4,
        )


def _require_alike(first: Mapping[str, Any], state: Any, rank: int) -> None:
    """Refuse a list of states that were not saved together, which would be added up to nonsense."""
    if state is None:
        raise LayoutError(f"resize=True needs the state of old rank {rank} on this rank; pass those of all old ranks")
    if state.get("rank") != rank or state.get("size") != first["size"]:
        raise LayoutError(
            f"the state in place {rank} is that of rank {state.get('rank')} of {state.get('size')}; resize=True needs "
            f"those of all {first['size']} old ranks in rank order"
        )
    if state.get("step") != first.get("step"):
        raise LayoutError(
            f"the state of old rank {rank} is of step {state.get('step')}, that of rank 0 of step {first.get('step')}; "
            "resize=True needs states that were saved together"
        )
    if _shapes(state) != _shapes(first):
        raise LayoutError(f"the state of old rank {rank} belongs to another model than that of rank 0")


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    parameters = state.get("parameters")
    if not isinstance(parameters, Mapping) or not all(isinstance(e, Mapping) for e in parameters.values()):
        raise LayoutError("a saved compressor state holds no parameters; give it what state_dict() returned")
    return {n: {k: np.shape(e[k]) for k in ("u", "v", "error") if k in e} for n, e in parameters.items()}


CONNECTED: Final = (
    "a compressor that is bound to a model cannot be copied or pickled, as it holds this rank's residuals and a "
    "connection to the other ranks: copy it before it is bound, or build a new one on every rank and hand it this "
    "one's state with load_state_dict(compression.state_dict())"
)


class Uncopied:
    """Mixed into an optimizer, before the framework's own class: it is neither copied nor pickled."""

    uncopied: str
    """What cannot be done, why, and what to do instead."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Neither ``copy`` nor ``pickle``.

        Raises:
            TypeError: always.
        """
        raise TypeError(self.uncopied)
