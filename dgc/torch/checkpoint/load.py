"""Reading a checkpoint of a whole job: all ranks look at everything before one of them changes anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.serialization import MAP_LOCATION
from torch.utils._pytree import tree_map_only

from dgc.core.state import old_ranks_of
from dgc.errors import LayoutError
from dgc.torch.checkpoint.alone import take_over
from dgc.torch.checkpoint.before import Before
from dgc.torch.checkpoint.files import rank_file, read, read_main
from dgc.torch.checkpoint.ranks import Ranks
from dgc.torch.compressor import DGCCompressor


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: DGCCompressor,
    resize: bool = False,
    map_location: MAP_LOCATION = "cpu",
) -> Any:
    """Load what :func:`save_checkpoint` saved; call it on all ranks. The run continues bit for bit.

    Where it raises an error, model, optimizer and compressor are what they were before, on all ranks.

    Args:
        directory: as given to :func:`save_checkpoint`.
        model: gets the saved parameters.
        optimizer: the distributed one; gets the saved options and state.
        compression: gets this rank's state.
        resize: allow another number of ranks; the old residuals are redistributed so that their mean is kept. A single
            process keeps the mean momentum, and says that it drops residuals.
        map_location: as in ``torch.load``.

    Returns:
        ``extra``.

    Raises:
        FileNotFoundError: no checkpoint, or a rank's file is missing.
        ConfigError: the optimizer was not wrapped yet, or FSDP has sharded the model.
        LayoutError: another model, op, or number of ranks without ``resize=True``; a file is damaged or does not
            belong to the others; or called in the middle of a step.
        RuntimeError: (of torch) the model or the optimizer does not fit.
        TransportError: the ranks differ, or the compressor was closed.

    Warns:
        RuntimeWarning: what the ranks had not sent yet is dropped, as a single process exchanges nothing.
    """
    folder, ranks = Path(directory), Ranks(model, compression, "load_checkpoint()")
    main: dict[str, Any] = {}
    states: list[Any] = []

    def look() -> dict[str, Any]:
        main.update(read_main(folder, map_location))
        if ranks.takes_part:
            states.extend(_states(folder, main, ranks, resize))
            own = _own(folder, main, compression, states, ranks)
            if compression.engine is not None:
                states[:] = [own]
        return {"token": main["token"], "step": states[0].get("step", 0) if states else 0}

    def change() -> dict[str, Any]:
        model.load_state_dict(main["model"])
        optimizer.load_state_dict(main["optimizer"])
        return {}

    ranks.agree(look, "read the checkpoint")
    before = Before(model, optimizer, compression)
    try:
        ranks.agree(change, "load model and optimizer")
        if compression.engine is not None:
            compression.load_state_dict(states[0])
        elif compression.is_bound and ranks.takes_part:
            take_over(model, optimizer, compression, states)
        elif ranks.takes_part:
            compression.load_state_dict(states, resize=True)
    except BaseException:
        before.put_back()
        raise
    return main["extra"]


def _states(folder: Path, main: dict[str, Any], ranks: Ranks, resize: bool) -> list[Any]:
    """The old ranks' states in rank order; None for those that this rank does not need.

    Raises:
        FileNotFoundError: a file is missing.
        LayoutError: one is damaged, belongs to another checkpoint or rank, or there is another number of ranks.
    """
    old_size, token = main["size"], main["token"]
    if old_size != ranks.size and not resize:
        raise LayoutError(
            f"the checkpoint in {folder} was saved by {old_size} ranks, this job has {ranks.size}; pass resize=True to "
            "redistribute the residuals"
        )
    needed = [ranks.rank] if old_size == ranks.size else sorted({0, *old_ranks_of(ranks.rank, old_size, ranks.size)})
    states: list[Any] = [None] * old_size
    for r in needed:
        path = folder / rank_file(token, r, old_size)
        content = read(
            path,
            "every rank saves its own residuals; put all files of the checkpoint into a directory that every rank can "
            "read",
        )
        state = tree_map_only(torch.Tensor, torch.Tensor.numpy, content)
        if state.pop("token", token) != token or (state.get("rank"), state.get("size")) != (r, old_size):
            raise LayoutError(
                f"{path} was renamed: it holds the state of rank {state.get('rank')} of {state.get('size')}, or is of "
                "another checkpoint; put the files back under the names that they were saved under"
            )
        states[r] = state
    return states


def _own(
    folder: Path, main: dict[str, Any], compression: DGCCompressor, states: list[Any], ranks: Ranks
) -> dict[str, Any]:
    """This rank's state for its compressor, which will take it; {} for a single process.

    Raises:
        LayoutError: it will not; names the file.
    """
    as_saved = len(states) == ranks.size
    try:
        return compression.fitting_state(states[ranks.rank] if as_saved else states, resize=not as_saved)
    except LayoutError as error:
        name = rank_file(main["token"], ranks.rank, ranks.size) if as_saved else "the ranks' files"
        raise LayoutError(f"{name} in {folder}: {error}") from error
