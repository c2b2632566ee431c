"""Writing a checkpoint of a whole job."""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dgc.core.state import require_sound
from dgc.torch.checkpoint.files import MAIN_FILE, Written, rank_file, sweep, token_in, why_refused
from dgc.torch.checkpoint.ranks import Ranks
from dgc.torch.compressor import DGCCompressor
from dgc.transport.agreement import agree_or_raise

_TOKEN_BYTES = 8


def save_checkpoint(
    directory: str | os.PathLike[str],
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: DGCCompressor,
    extra: object = None,
) -> None:
    """Save model, optimizer and every rank's compressor state; call it on all ranks, between steps.

    The optimizer is saved with its momentum and weight decay as the user gave them, so that ``checkpoint.pt`` is also
    an ordinary dense checkpoint. A rank outside the process set has nothing to save.

    Args:
        directory: where to save; made if missing. It must be the same place for all ranks to be able to resize.
        model: its ``state_dict()`` is saved by rank 0.
        optimizer: the distributed one.
        compression: the compressor.
        extra: numbers, strings, tensors and containers of them (epoch, the scheduler's and scaler's state dicts, ...).

    Raises:
        ConfigError: the optimizer was not wrapped yet, ranks name different directories, or FSDP has sharded the model.
        LayoutError: called in the middle of a step or after one that failed, or the state is not finite.
        TransportError: a rank could not write; every rank gets the error, the old checkpoint stays, and nothing is left
            of the new one. Or the compressor was closed.
        TypeError: ``extra`` holds something that cannot be loaded safely.
    """
    folder, ranks = Path(directory), Ranks(model, compression, "save_checkpoint()")
    if compression.engine is not None:
        # Here alone: where one rank's step has failed, the others may be in the next.
        compression.engine.require_between_steps("save_checkpoint()", whole=True)
    if not ranks.takes_part:
        return
    state = compression.state_dict()

    def look() -> dict[str, Any]:
        _require_loadable(extra)
        if state.get("parameters"):
            require_sound(state)
        return {"step": state.get("step", 0)}

    agree_or_raise(
        ranks.transport,
        lambda: {"directory": os.path.abspath(directory)},
        "arguments of save_checkpoint()",
        advice="Give every rank the same directory",
    )
    ranks.agree(look, "save")
    before = token_in(folder) if ranks.rank == 0 else None
    drawn = ranks.gather(secrets.token_hex(_TOKEN_BYTES) + (before or ""), 4 * _TOKEN_BYTES)[0]
    token, replaced = drawn[: 2 * _TOKEN_BYTES], drawn[2 * _TOKEN_BYTES :]
    written = Written(token)

    def write_own() -> None:
        written.add(folder / rank_file(token, ranks.rank, ranks.size), {**state, "token": token})

    def write_main() -> None:
        if ranks.rank == 0:
            content = {
                "token": token,
                "size": ranks.size,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "extra": extra,
            }
            written.add(folder / MAIN_FILE, content)

    try:
        _write(ranks, written, write_own, "write the compressor's state")
        _write(ranks, written, write_main, "write the checkpoint")
        sweep(folder, token, replaced, ranks.rank, ranks.size)
    finally:
        written.release()


def _write(ranks: Ranks, written: Written, work: Callable[[], None], what: str) -> None:
    """Write on all ranks, or leave nothing behind on any.

    Where the ranks cannot be asked, the files stay: another rank may have completed the checkpoint.
    """
    failed: Exception | None = None
    try:
        work()
    except Exception as error:
        failed = error
    if "failed" in ranks.gather("" if failed is None else "failed", len("failed")):
        written.discard()

    def outcome() -> dict[str, Any]:
        if failed is not None:
            raise failed
        return {}

    ranks.agree(outcome, what)


def _require_loadable(extra: object) -> None:
    """Refuse now what ``load_checkpoint``, which runs no code from a file, would refuse when it is too late."""
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except Exception as error:
        buffer.seek(0)
        raise TypeError(
            "extra= holds something else than numbers, strings, tensors and containers of them, which cannot "
            f"be loaded safely; convert it (float(x), vars(args)): {why_refused(buffer, error)}"
        ) from error
