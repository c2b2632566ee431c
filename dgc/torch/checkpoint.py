"""Saving and loading a whole job: model and optimizer once, the compressor's state once per rank.

A directory holds ``checkpoint.pt`` (rank 0: model, optimizer, extra) and one ``compressor-<token>-<rank>-of-<size>.pt``
per rank. Each file is written beside its place and renamed, and the ranks' files are complete before ``checkpoint.pt``
names their token: a job that dies while saving leaves the previous checkpoint intact.

A library whose checkpoints one rank writes gets every rank's state from :func:`gathered_states`, and
``torch.distributed.checkpoint``, which every rank writes, from :class:`RankState`.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import secrets
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from torch.serialization import MAP_LOCATION
from torch.utils._pytree import tree_map_only

from dgc.adapter.agreement import agree_or_raise
from dgc.adapter.engine import INACTIVE
from dgc.core.collectives import Transport, gather_values
from dgc.core.state import old_ranks_of, require_sound, write_whole
from dgc.errors import ConfigError, LayoutError, TransportError
from dgc.torch.compressor import DGCCompressor
from dgc.torch.distributed import job_of
from dgc.torch.tensors import is_sharded
from dgc.transport.local import local_world

MAIN_FILE = "checkpoint.pt"

_CHUNK = 1 << 22
"""Bytes of each rank that are gathered at a time: what the other ranks than 0 need beside their own state."""
_FOREIGN = "it was not written by save_checkpoint()"
_SHOWN = 3
"""Names of classes in an error."""


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
        TransportError: a rank could not write; every rank gets the error, and the old checkpoint stays. Or the
            compressor was closed.
        TypeError: ``extra`` holds something that cannot be loaded safely.
    """
    transport = _transport(model, compression, "save_checkpoint()")
    if compression.engine is not None:
        # Here alone: where one rank's step has failed, the others may be in the next.
        compression.engine.require_between_steps("save_checkpoint()", whole=True)
    if not compression.takes_part:
        return
    folder, rank = Path(directory), transport.rank
    state = compression.state_dict() if compression.is_bound else dict(INACTIVE)

    def look() -> dict[str, Any]:
        _require_loadable(extra)
        if state.get("parameters"):
            require_sound(state)
        return {"step": state.get("step", 0)}

    agree_or_raise(
        transport,
        lambda: {"directory": os.path.abspath(directory)},
        "arguments of save_checkpoint()",
        advice="Give every rank the same directory",
    )
    _agree(transport, look, "save")
    token, replaced = gather_values(transport, [secrets.token_hex(8), _token_in(folder)])[0]
    own = folder / _rank_file(token, rank, transport.size)

    def write_own() -> dict[str, Any]:
        _write(own, {**state, "token": token}, token)
        return {}

    def write_main() -> dict[str, Any]:
        if rank == 0:
            weights, options = model.state_dict(), optimizer.state_dict()
            content = {"token": token, "size": transport.size, "model": weights, "optimizer": options, "extra": extra}
            _write(folder / MAIN_FILE, content, token)
        return {}

    try:
        _agree(transport, write_own, "write the compressor's state")
        _agree(transport, write_main, "write the checkpoint")
    except Exception:
        if _token_in(folder) != token:  # rank 0 may have completed it
            _delete(own)
        raise
    if replaced:
        for path in folder.glob(f"compressor-{replaced}-*-of-*.pt"):
            if int(path.name.split("-")[2]) % transport.size == rank:
                _delete(path)


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

    All ranks have read and checked their files before one of them changes anything.

    Args:
        directory: as given to :func:`save_checkpoint`.
        model: gets the saved parameters.
        optimizer: the distributed one; gets the saved options and state.
        compression: gets this rank's state.
        resize: allow another number of ranks; the old residuals are redistributed so that their mean is kept. A single
            process drops them and the momentum, and says so.
        map_location: as in ``torch.load``.

    Returns:
        ``extra``.

    Raises:
        FileNotFoundError: no checkpoint, or a rank's file is missing.
        ConfigError: the optimizer was not wrapped yet, or FSDP has sharded the model.
        LayoutError: another model, op, or number of ranks without ``resize=True``; a file is damaged or does not
            belong to the others; or called in the middle of a step.
        RuntimeError: (of torch) the model or the optimizer does not fit; what was loaded by then stays.
        TransportError: the ranks differ, or the compressor was closed.

    Warns:
        RuntimeWarning: what the ranks had not sent yet is dropped, as a single process exchanges nothing.
    """
    folder, transport = Path(directory), _transport(model, compression, "load_checkpoint()")
    main: dict[str, Any] = {}
    states: list[Any] = []

    def look() -> dict[str, Any]:
        main.update(_read_main(folder, map_location))
        if not compression.takes_part:
            return {"token": main["token"]}
        states.extend(_read_states(folder, main, transport, resize))
        same = len(states) == transport.size
        try:
            own = compression.fitting_state(states[transport.rank] if same else states, resize=not same)
        except LayoutError as error:
            name = _rank_file(main["token"], transport.rank, len(states)) if same else "the ranks' files"
            raise LayoutError(f"{name} in {folder}: {error}") from error
        if compression.engine is not None:
            states[:] = [own]
        return {"token": main["token"], "step": states[0].get("step", 0)}

    def change() -> dict[str, Any]:
        model.load_state_dict(main["model"])
        optimizer.load_state_dict(main["optimizer"])
        return {}

    _agree(transport, look, "read the checkpoint")
    _agree(transport, change, "load model and optimizer")
    if compression.takes_part:
        alone = compression.engine is None
        compression.load_state_dict(states if alone else states[0], resize=alone)
    return main["extra"]


class RankState:
    """A ``Stateful`` of ``torch.distributed.checkpoint`` that keeps every rank's own residuals, momentum and step.

    Give it to ``save`` and ``load`` in the compressor's place. What has one name on all ranks is saved once there, so
    that each rank's state has a name of its own, and is one value of bytes.
    """

    def __init__(self, compression: DGCCompressor) -> None:
        """Take a compressor that is bound to an optimizer. Local: no communication."""
        self._compression = compression
        self._name = f"rank{dist.get_rank()}-of-{dist.get_world_size()}"

    def state_dict(self) -> dict[str, Any]:
        """This rank's state under a name of its own.

        Raises:
            LayoutError: called in the middle of a step, or after one that failed.
        """
        return {self._name: _as_bytes(self._compression).getvalue()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; call it on all ranks.

        Raises:
            KeyError: it is of another number of ranks; ``torch.distributed.checkpoint`` has looked for it before.
            LayoutError: it is of another rank or model.
        """
        self._compression.load_state_dict(torch.load(io.BytesIO(state_dict[self._name]), weights_only=True))


def gathered_states(compression: DGCCompressor) -> dict[str, Any]:
    """``state_dict()`` of every rank, as bytes, on rank 0; nothing on the others. Collective, between steps.

    Raises:
        LayoutError: called in the middle of a step, or after one that failed.
    """
    engine = compression.engine
    if engine is not None:
        engine.require_open("state_dict()")
        engine.require_between_steps("state_dict()", whole=True)
    own = np.frombuffer(_as_bytes(compression).getbuffer(), np.uint8)
    gathered = [own] if engine is None else gather_bytes(engine.transport, own)
    return {"ranks": [torch.from_numpy(state) for state in gathered]}


def load_gathered(compression: DGCCompressor, saved: dict[str, Any]) -> None:
    """Load what :func:`gathered_states` returned on rank 0, on as many ranks or others; {} loads nothing. Collective.

    Raises:
        LayoutError: it is something else, or does not fit; no rank's state is changed then.
    """
    engine = compression.engine
    rank, size = (0, 1) if engine is None else (engine.transport.rank, engine.transport.size)
    found: list[dict[str, Any]] = []

    def read() -> dict[str, Any]:
        states = saved["ranks"] if isinstance(saved, dict) and saved else []
        try:
            for state in states[rank : rank + 1] if len(states) == size else states:
                found.append(torch.load(io.BytesIO(state.cpu().numpy()), map_location="cpu", weights_only=True))
        except Exception as error:  # torch raises whatever it likes
            raise LayoutError(f"the compressor's state in this checkpoint is damaged: {error}") from error
        return {"number of ranks that saved": len(states)}

    if engine is None:
        read()
    else:
        engine.require_open("load_state_dict()")
        agree_or_raise(engine.transport, read, "saved states", LayoutError, "Load the file that rank 0 has written.")
    if found:
        resize = len(saved["ranks"]) != size
        compression.load_state_dict(found if resize else found[0], resize=resize)


# -- ranks -------------------------------------------------------------------------------------------------------------


def _transport(model: torch.nn.Module, compression: DGCCompressor, what: str) -> Transport:
    """What connects the ranks that exchange gradients, or this process to itself. Local: no communication."""
    if any(map(is_sharded, model.parameters())):
        raise ConfigError(
            f"{what} knows no sharded parameters: give model, optimizer and dgc.torch.RankState(compression) to "
            "torch.distributed.checkpoint, as docs/fsdp.md shows"
        )
    if (engine := compression.engine) is not None:
        engine.require_open(what)
        engine.require_between_steps(what)
        return engine.transport
    if not compression.is_bound and _started_ranks() > 1:
        raise ConfigError(
            f"{what} was called before the compressor knows its ranks: wrap the optimizer first, "
            "dgc.torch.DistributedOptimizer(optimizer, ..., compression=compression)"
        )
    return local_world(1)[0]


def _started_ranks() -> int:
    job = job_of()
    try:
        job.require_ready()
        return job.size
    except ConfigError:
        return 1


def _agree(transport: Transport, work: Callable[[], dict[str, Any]], what: str) -> None:
    """Do something on all ranks; an error on one of them is raised on all."""
    agree_or_raise(transport, work, f"results of the attempt to {what}", TransportError)


def gather_bytes(transport: Transport, own: np.ndarray, root: int = 0) -> list[np.ndarray]:
    """Every rank's (n_r,) uint8, on the rank ``root``; nothing on the others. Collective."""
    sizes = gather_values(transport, own.size)
    whole = [np.empty(size, np.uint8) for size in sizes] if transport.rank == root else []
    for start in range(0, max(sizes), _CHUNK):
        part = np.zeros(min(_CHUNK, max(sizes) - start), np.uint8)
        part[: max(0, own.size - start)] = own[start : start + part.size]
        parts = np.empty((transport.size, part.size), np.uint8)
        transport.allgather(part, parts)
        for array, piece in zip(whole, parts, strict=False):
            array[start : start + part.size] = piece[: max(0, array.size - start)]
    return whole


# -- files -------------------------------------------------------------------------------------------------------------


def _rank_file(token: str, rank: int, size: int) -> str:
    return f"compressor-{token}-{rank:05d}-of-{size:05d}.pt"


def _as_bytes(compression: DGCCompressor) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(compression.state_dict(), buffer)
    return buffer


def _write(path: Path, content: object, token: str) -> None:
    """Write a file whole or not at all, with checksums, which users can turn off in torch."""

    def write(file: BinaryIO) -> None:
        with _checksums():
            try:
                torch.save(content, file)
            except RuntimeError:
                file.flush()  # what could not be written is still in the buffer: this raises the reason
                raise

    write_whole(path, path.with_name(f"{path.name}.{token}.partial"), write)


@contextlib.contextmanager
def _checksums() -> Iterator[None]:
    if not hasattr(torch.serialization, "set_crc32_options"):
        yield
        return
    chosen = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(chosen)


def _delete(path: Path) -> None:
    """What cannot be deleted stays: the checkpoint is whole, and this rank may be the only one to fail."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _token_in(folder: Path) -> str:
    """Which files the checkpoint in a directory names; "" if there is none that can be read."""
    try:
        return str(torch.load(folder / MAIN_FILE, map_location="cpu", weights_only=True, mmap=True)["token"])
    except Exception:
        return ""


def _read(path: Path, advice: str, map_location: MAP_LOCATION = "cpu") -> dict[str, Any]:
    """Load a file after comparing its checksums, at which torch does not look."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: {advice}")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
    except Exception as error:  # zipfile and zlib raise whatever they like
        raise LayoutError(
            f"{path} is empty, damaged or cut off, or {_FOREIGN} ({error}); take another copy, or an earlier one"
        ) from error
    try:
        content = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # and torch, too
        raise LayoutError(
            f"{path} cannot be loaded: {_FOREIGN}, or by a newer version ({_why_refused(path, error)})"
        ) from error
    if not isinstance(content, dict):
        raise LayoutError(f"{path} holds a {type(content).__name__}: {_FOREIGN}")
    return content


def _read_main(folder: Path, map_location: MAP_LOCATION) -> dict[str, Any]:
    """The file of rank 0."""
    path = folder / MAIN_FILE
    advice = "there is no checkpoint in this directory; name the one that was given to save_checkpoint()"
    content = _read(path, advice, map_location)
    size, token = content.get("size"), content.get("token")
    known = isinstance(size, int) and size > 0 and isinstance(token, str)
    if not known or not {"model", "optimizer", "extra"} <= set(content):
        raise LayoutError(
            f"{path} is a checkpoint of another kind: {_FOREIGN}. Load it with torch.load() into model and optimizer "
            "on rank 0 and broadcast both; the compressor begins with empty residuals"
        )
    return content


def _read_states(folder: Path, main: dict[str, Any], transport: Transport, resize: bool) -> list[Any]:
    """The old ranks' states in rank order; None for those that this rank does not need."""
    rank, size, old, token = transport.rank, transport.size, main["size"], main["token"]
    if old != size and not resize:
        raise LayoutError(
            f"the checkpoint in {folder} was saved by {old} ranks, this job has {size}; pass resize=True to "
            "redistribute the residuals"
        )
    states: list[Any] = [None] * old
    advice = (
        "put all files of the checkpoint into a directory that every rank can read: each rank saves its own residuals"
    )
    for r in {rank} if old == size else {0, *old_ranks_of(rank, old, size)}:
        path = folder / _rank_file(token, r, old)
        state = tree_map_only(torch.Tensor, torch.Tensor.numpy, _read(path, advice))
        if state.pop("token", token) != token or (state.get("rank"), state.get("size")) != (r, old):
            raise LayoutError(
                f"{path} was renamed: it holds the state of rank {state.get('rank')} of {state.get('size')}, or is of "
                "another checkpoint; put the files back under the names that they were saved under"
            )
        states[r] = state
    return states


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
            f"be loaded safely; convert it (float(x), vars(args)): {_why_refused(buffer, error)}"
        ) from error


def _why_refused(file: Path | BinaryIO, error: Exception) -> str:
    """Why ``torch.load`` did not load a file, without its advice to run the code that may be in it."""
    if not isinstance(error, pickle.UnpicklingError):
        return str(error).splitlines()[0]
    try:
        kinds = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # torch < 2.6, or what is damaged
        kinds = []
    return f"it holds {', '.join(kinds[:_SHOWN])}" if kinds else "it holds something else than numbers and tensors"
