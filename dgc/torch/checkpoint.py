"""Saving and loading a whole job: model and optimizer once, the compressor's state once per rank.

A directory holds ``checkpoint.pt`` (rank 0: model, optimizer, extra) and one ``compressor-<token>-<rank>-of-<size>.pt``
per rank. The token ties them together: the ranks' files are complete before ``checkpoint.pt`` names them, so that a
job that dies while saving leaves the previous checkpoint intact.
"""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dgc.core.state.state import old_ranks_of
from dgc.core.transport import Transport
from dgc.errors import LayoutError, TransportError
from dgc.torch.compressor import DGCCompressor
from dgc.transport.agreement import agree_or_raise

MAIN_FILE = "checkpoint.pt"


def save_checkpoint(
    directory: str | os.PathLike[str],
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: DGCCompressor,
    extra: Any = None,
) -> None:
    """Save model, optimizer and every rank's compressor state; call it on all ranks, between steps.

    The optimizer is saved with its momentum and weight decay as the user gave them, so that ``checkpoint.pt`` is also
    an ordinary dense checkpoint.

    Args:
        directory: where to save; made if missing. It must be the same place for all ranks to be able to resize.
        model: its ``state_dict()`` is saved by rank 0.
        optimizer: the distributed one.
        compression: the compressor.
        extra: numbers, strings, tensors and containers of them (epoch, the scheduler's and scaler's state dicts, ...).

    Raises:
        LayoutError: called in the middle of a step.
        TransportError: a rank could not write; every rank gets the error and the old checkpoint stays.
        TypeError: ``extra`` holds something that cannot be loaded safely.
    """
    folder = Path(directory)
    transport = _idle_transport(compression, "save_checkpoint()")
    rank, size = (transport.rank, transport.size) if transport is not None else (0, 1)
    token = _common_token(transport)
    _on_all_ranks(transport, lambda: _require_loadable(extra), "save extra")

    def write_own() -> dict[str, Any]:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / _rank_file(token, rank, size), _to_tensors(compression.state_dict()))
        return {}

    def write_main() -> dict[str, Any]:
        if rank == 0:
            content = {
                "token": token,
                "size": size,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "extra": extra,
            }
            _write(folder / MAIN_FILE, content)
        return {}

    _on_all_ranks(transport, write_own, "write the compressor's state")
    _on_all_ranks(transport, write_main, "write the checkpoint")
    for stale in folder.glob(f"compressor-*-{rank:05d}-of-*.pt"):
        if token not in stale.name:
            stale.unlink(missing_ok=True)


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: DGCCompressor,
    resize: bool = False,
    map_location: Any = "cpu",
) -> Any:
    """Load what :func:`save_checkpoint` saved; call it on all ranks. The run continues bit for bit.

    Args:
        directory: as given to :func:`save_checkpoint`.
        model: gets the saved parameters.
        optimizer: the distributed one; gets the saved options and state.
        compression: gets this rank's state.
        resize: allow another number of ranks; the old residuals are redistributed so that their mean is kept.
        map_location: as in ``torch.load``.

    Returns:
        ``extra``.

    Raises:
        FileNotFoundError: no checkpoint, or a rank's file is missing.
        LayoutError: another model, or another number of ranks without ``resize=True``; or called in the middle of a
            step.
    """
    folder = Path(directory)
    transport = _idle_transport(compression, "load_checkpoint()")
    rank, size = (transport.rank, transport.size) if transport is not None else (0, 1)
    loaded: dict[str, Any] = {}

    def read() -> dict[str, Any]:
        main = torch.load(folder / MAIN_FILE, map_location=map_location, weights_only=True)
        old_size, token = main["size"], main["token"]
        if old_size != size and not resize:
            raise LayoutError(
                f"the checkpoint in {folder} was saved by {old_size} ranks, this job has {size}; pass resize=True to "
                "redistribute the residuals"
            )
        needed = [rank] if old_size == size else sorted({0, *old_ranks_of(rank, old_size, size)})
        states: list[Any] = [None] * old_size
        for r in needed:
            path = folder / _rank_file(token, r, old_size)
            if not path.exists():
                raise FileNotFoundError(
                    f"{path} is missing: every rank saves its own residuals; put all files of the checkpoint into a "
                    "directory that every rank can read"
                )
            states[r] = _to_arrays(torch.load(path, map_location="cpu", weights_only=True))
        loaded.update(main=main, states=states)
        return {"token": token}

    _on_all_ranks(transport, read, "read the checkpoint")
    main, states = loaded["main"], loaded["states"]
    model.load_state_dict(main["model"])
    optimizer.load_state_dict(main["optimizer"])
    if len(states) == size:
        if not states[rank].get("inactive"):
            compression.load_state_dict(states[rank])
    else:
        compression.load_state_dict(states, resize=True)
    return main["extra"]


def _idle_transport(compression: DGCCompressor, what: str) -> Transport | None:
    """The transport, which belongs to the exchange while a step is under way; None where nothing is exchanged.

    Raises:
        LayoutError: a step is under way.
    """
    engine = compression.engine
    if engine is None:
        return None
    engine.require_between_steps(what)
    return engine.transport


def _require_loadable(extra: Any) -> dict[str, Any]:
    """Refuse now what ``load_checkpoint``, which runs no code from a file, would refuse when it is too late."""
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise TypeError(
            "extra= holds something else than numbers, strings, tensors and containers of them, which cannot "
            f"be loaded safely; convert it (float(x), vars(args)): {str(error).splitlines()[0]}"
        ) from error
    return {}


def _on_all_ranks(transport: Transport | None, work: Callable[[], dict[str, Any]], what: str) -> None:
    if transport is None:
        work()
        return
    agree_or_raise(transport, work, f"results of the attempt to {what}", TransportError)


def _common_token(transport: Transport | None) -> str:
    """Eight random bytes of rank 0, in hexadecimal, the same on all ranks."""
    own = np.frombuffer(secrets.token_bytes(8), np.uint8)
    if transport is None:
        return own.tobytes().hex()
    gathered = np.empty((transport.size, 8), np.uint8)
    transport.allgather(own.copy(), gathered)
    return gathered[0].tobytes().hex()


def _rank_file(token: str, rank: int, size: int) -> str:
    return f"compressor-{token}-{rank:05d}-of-{size:05d}.pt"


def _write(path: Path, content: Any) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    torch.save(content, partial)
    os.replace(partial, path)


def _to_tensors(value: Any) -> Any:
    """Replace arrays by tensors, so that the file loads with ``weights_only=True``."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {k: _to_tensors(v) for k, v in value.items()}
    return value


def _to_arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {k: _to_arrays(v) for k, v in value.items()}
    return value
