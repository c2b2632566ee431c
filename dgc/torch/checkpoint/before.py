"""Model and optimizer as they were before a checkpoint was loaded, for the case that a rank cannot load it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from dgc.torch.compressor import DGCCompressor


class Before:
    """Copies of the model's tensors, on the host, and what the optimizer held."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, compression: DGCCompressor) -> None:
        """Copy; of the optimizer's state only the dicts, as loading replaces the tensors."""
        self._saved = None if compression.engine is None else compression.engine.watch.saved
        self._pending = None if self._saved is None else self._saved.pending
        self._optimizers = [
            (each, each.state, _copied(each.state), each.param_groups, list(map(dict, each.param_groups)), _flags(each))
            for each in (optimizer, *_parts(optimizer))
        ]
        tensors = {id(t): t for t in itertools.chain(model.parameters(), model.buffers())}
        self._tensors = [(t, t.detach().to("cpu", copy=True)) for t in tensors.values()]

    def put_back(self) -> None:
        """Let both hold what they held."""
        with torch.no_grad():
            for tensor, values in self._tensors:
                tensor.copy_(values)
        for optimizer, state, entries, groups, contents, flags in self._optimizers:
            for group, content in zip(groups, contents, strict=True):
                group.clear()
                group.update(content)
            if isinstance(state, dict):
                state.clear()
                state.update(entries)
            optimizer.__dict__.update(state=state, param_groups=groups, **flags)
        if self._saved is not None and self._pending is not None:
            self._saved.pending = self._pending


def _parts(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The optimizer that a sharding one drives."""
    return [part for part in vars(optimizer).values() if isinstance(part, torch.optim.Optimizer)]


def _copied(state: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: dict(entry) if isinstance(entry, dict) else entry for key, entry in state.items()}


def _flags(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a sharding optimizer remembers of a state that was loaded."""
    return {name: vars(optimizer)[name] for name in ("_state_loaded", "_consolidated") if name in vars(optimizer)}
