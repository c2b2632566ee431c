"""Save and load a job: model and optimizer once, the compressor's state once per rank.

A folder holds a main file, which rank 0 writes, and one ``compressor-<token>-<rank>-of-<size>.pt`` per rank. The main
file of :func:`save_checkpoint` is ``checkpoint.pt`` with model, optimizer and extra. Files for Hugging Face's Trainer
have other names, so that a folder can hold both. Each file is written under another name and then renamed, and the
ranks' files are complete before the main file names their token. So a job that dies while it saves leaves the previous
checkpoint intact.

Other libraries save checkpoints in one of two ways. If one rank writes, it gets every rank's state from
:func:`gathered_states`. In ``torch.distributed.checkpoint`` every rank writes; :class:`RankState` is for that.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
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
from dgc.core.collectives import Transport, gather_values
from dgc.core.saved import INACTIVE, needed_ranks, require_sound
from dgc.core.state_file import write_whole
from dgc.errors import ConfigError, LayoutError, TransportError
from dgc.torch.compressor import DGCCompressor
from dgc.torch.distributed import job_of
from dgc.torch.packing import gather_packed, packed, unpacked
from dgc.torch.tensors import is_sharded
from dgc.transport.local import local_world

_MAIN_FILE = "checkpoint.pt"
_TRAINERS_FILE = "compression.pt"  # the main file in a checkpoint of Hugging Face's Trainer
_RANKS_FILES = {_MAIN_FILE: "compressor", _TRAINERS_FILE: "compression"}  # how their names begin, by main file
_TOKEN = "[0-9a-f]{16}"
_FOREIGN = "it was not written by save_checkpoint() or trainer_callback()"
_SHOWN = 3  # names of classes in an error


def save_checkpoint(
    directory: str | os.PathLike[str],
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: DGCCompressor,
    extra: object = None,
) -> None:
    """Save model, optimizer and every rank's compressor state. Call it on all ranks, between steps.

    With step-ahead error feedback, model and optimizer become equal on all ranks first (``compression.average()``).

    The optimizer is saved with the user's momentum and weight decay, so that ``checkpoint.pt`` is also an ordinary
    dense checkpoint. A rank outside the process set saves nothing.

    Args:
        directory: where to save; made if missing. To load on another number of ranks, all ranks must share it.
        model: rank 0 saves its ``state_dict()``.
        optimizer: the distributed optimizer.
        compression: the compressor.
        extra: numbers, strings, tensors and containers of them (epoch, the scheduler's and scaler's state dicts, ...).

    Raises:
        ConfigError: the optimizer was not wrapped yet, ranks name different directories, or FSDP has sharded the model.
        LayoutError: it was called in the middle of a step or after a failed one, or the state is not finite.
        TransportError: a rank could not write, and the old checkpoint stays; every rank gets this error. Or the
            compressor was closed.
        TypeError: ``extra`` holds an object that cannot be loaded safely.
    """
    transport = _transport(model, compression, "save_checkpoint()")

    def content() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": extra}

    _save(Path(directory) / _MAIN_FILE, compression, transport, content, lambda: _require_loadable(extra), optimizer)


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: DGCCompressor,
    resize: bool = False,
    map_location: MAP_LOCATION = "cpu",
) -> Any:
    """Load a checkpoint of :func:`save_checkpoint`. Call it on all ranks. The run continues bit for bit.

    All ranks read and check their files before one of them changes anything.

    Args:
        directory: as given to :func:`save_checkpoint`.
        model: gets the saved parameters.
        optimizer: the distributed optimizer; gets the saved options and state.
        compression: gets this rank's state.
        resize: allow another number of ranks; the old residuals are redistributed so that their mean is kept. A single
            process drops them and the momentum, with a warning.
        map_location: as in ``torch.load``.

    Returns:
        ``extra``.

    Raises:
        FileNotFoundError: there is no checkpoint, or a rank's file is missing.
        ConfigError: the optimizer was not wrapped yet, or FSDP has sharded the model.
        LayoutError: the checkpoint has another model, op, or number of ranks (without ``resize=True``); a file is
            damaged or does not belong to the others; or it was called in the middle of a step.
        RuntimeError: (of torch) the model or the optimizer does not fit; the model may have been loaded.
        TransportError: the ranks differ, or the compressor was closed.

    Warns:
        RuntimeWarning: residuals are dropped, because a single process exchanges nothing.
    """
    folder, transport = Path(directory), _transport(model, compression, "load_checkpoint()")
    main: dict[str, Any] = {}
    states: list[Any] = []

    def look() -> dict[str, Any]:
        main.update(_read_main(folder, map_location))
        if not compression.takes_part:
            return {"token": main["token"]}
        path = folder / _MAIN_FILE
        states.extend(_fitting_states(path, main["token"], main["size"], compression, transport, resize))
        return {"token": main["token"], "step": states[0].get("step", 0)}

    def change() -> None:
        model.load_state_dict(main["model"])
        optimizer.load_state_dict(main["optimizer"])

    _agree(transport, look, "read the checkpoint")
    _agree(transport, change, "load model and optimizer")
    if compression.takes_part:
        _load(compression, states)
    return main["extra"]


class RankState:
    """A ``Stateful`` of ``torch.distributed.checkpoint`` that saves every rank's own residuals, momentum and step.

    Give it to ``save`` and ``load`` instead of the compressor. ``torch.distributed.checkpoint`` saves a value only once
    if it has the same name on all ranks. So each rank's state, as bytes, gets a different name.
    """

    def __init__(self, compression: DGCCompressor) -> None:
        """``compression`` is bound to an optimizer."""
        self._compression = compression
        self._name = f"rank{dist.get_rank()}-of-{dist.get_world_size()}"

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, under a name that no other rank uses. ``dcp.load`` calls this method, too.

        Raises:
            LayoutError: it was called in the middle of a step, or after a failed one; or with step-ahead error feedback
                ``compression.average(optimizer)`` was not called before.
        """
        return {self._name: _packed_state(self._compression).tobytes()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a result of :meth:`state_dict`. Call it on all ranks.

        Raises:
            KeyError: it was saved by a different number of ranks.
            LayoutError: it belongs to another rank or model.
        """
        self._compression.load_state_dict(unpacked(state_dict[self._name]))


def gathered_states(compression: DGCCompressor) -> dict[str, Any]:
    """Return every rank's ``state_dict()`` as bytes on rank 0, and nothing on the others. Collective, between steps.

    Raises:
        LayoutError: it was called in the middle of a step, or after a failed one.
    """
    transport = _transport_of(compression, "state_dict()")
    if compression.engine is not None:
        compression.engine.require_between_steps("state_dict()", whole=True)
    own: list[np.ndarray] = []
    _agree(transport, lambda: own.append(_packed_state(compression)), "pack the compressor's state")
    return {"ranks": [torch.from_numpy(state) for state in gather_packed(transport, own[0])]}


def load_gathered(compression: DGCCompressor, saved: dict[str, Any]) -> None:
    """Load rank 0's result of :func:`gathered_states`, on any number of ranks. {} loads nothing. Collective.

    Raises:
        LayoutError: ``saved`` is not such a result, or does not fit. No rank's state is changed.
    """
    engine = compression.engine
    rank, size = (0, 1) if engine is None else (engine.transport.rank, engine.transport.size)
    states: list[Any] = []

    def read() -> dict[str, Any]:
        given = saved["ranks"] if isinstance(saved, dict) and saved else []
        try:
            needed = needed_ranks(rank, len(given), size)
            states.extend(unpacked(each.cpu().numpy()) if r in needed else None for r, each in enumerate(given))
        except Exception as error:  # torch raises all kinds of errors
            raise LayoutError(f"the compressor's state in this checkpoint is damaged: {error}") from error
        return {"number of ranks that saved": len(states)}

    if engine is None:
        read()
    else:
        engine.require_open("load_state_dict()")
        agree_or_raise(engine.transport, read, "saved states", LayoutError, "Load the file that rank 0 has written.")
    if len(states) == size:
        compression.load_state_dict(states[rank])
    elif states:
        compression.load_state_dict(states, resize=True)


def save_for_trainer(folder: Path, compression: DGCCompressor) -> None:
    """Save every rank's state in a checkpoint folder of Hugging Face's Trainer. Collective."""
    _save(folder / _TRAINERS_FILE, compression, _transport_of(compression, "on_save()"))


def load_for_trainer(folder: Path, compression: DGCCompressor) -> None:
    """Load the states of :func:`save_for_trainer`, if rank 0 finds some, on any number of ranks. Collective."""
    transport, main = _transport_of(compression, "on_train_begin()"), folder / _TRAINERS_FILE
    named: tuple[str, int] = "", 0
    states: list[Any] = []

    def read_main() -> None:
        nonlocal named
        if transport.rank == 0:
            named = _token_and_size_in(main)

    _agree(transport, read_main, "read the compressor's state")
    token, size = gather_values(transport, named)[0]

    def look() -> dict[str, Any]:
        states.extend(_fitting_states(main, token, size, compression, transport, resize=True))
        return {"step": states[0].get("step", 0)}

    if token:
        _agree(transport, look, "read the compressor's state")
        _load(compression, states)


# -- ranks -------------------------------------------------------------------------------------------------------------


def _transport(model: torch.nn.Module, compression: DGCCompressor, what: str) -> Transport:
    """Return the transport of the exchange, or one for this process only. Not collective."""
    if any(map(is_sharded, model.parameters())):
        raise ConfigError(
            f"{what} does not support sharded parameters: give model, optimizer and "
            "dgc.torch.RankState(compression) to torch.distributed.checkpoint, as docs/pytorch.md shows"
        )
    if compression.engine is None and not compression.is_bound and _started_ranks() > 1:
        raise ConfigError(
            f"{what} was called before the compressor knows its ranks: wrap the optimizer first, "
            "dgc.torch.DistributedOptimizer(optimizer, ..., compression=compression)"
        )
    return _transport_of(compression, what)


def _transport_of(compression: DGCCompressor, what: str) -> Transport:
    if (engine := compression.engine) is None:
        return local_world(1)[0]
    engine.require_open(what)
    engine.require_between_steps(what)
    return engine.transport


def _started_ranks() -> int:
    job = job_of()
    try:
        job.require_ready()
        return job.size
    except ConfigError:
        return 1


def _agree(transport: Transport, work: Callable[[], dict[str, Any] | None], what: str) -> None:
    """Run ``work`` on all ranks; raise an error of one rank, or a difference between the results, on all of them."""
    agree_or_raise(transport, lambda: work() or {}, f"results of the attempt to {what}", TransportError)


# -- saving ------------------------------------------------------------------------------------------------------------


def _save(
    main: Path,
    compression: DGCCompressor,
    transport: Transport,
    content: Callable[[], dict[str, Any]] = dict,
    check: Callable[[], None] = lambda: None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Write the ranks' files and then the main file, and delete files of earlier saves. Collective, between steps.

    Args:
        main: the main file's path.
        compression: the compressor.
        transport: connects the ranks that save.
        content: returns the values that rank 0 adds to the token and the number of ranks in the main file.
        check: raises an error if this rank cannot save.
        optimizer: its state becomes equal on all ranks, with step-ahead error feedback.
    """
    if compression.engine is not None:
        # Check this on this rank only: if its step has failed, the others may be in the next step.
        compression.engine.require_between_steps("save_checkpoint()", whole=True)
        compression.engine.meet("save_checkpoint()")
    if not compression.takes_part:
        return
    folder, rank, size = main.parent, transport.rank, transport.size
    state: dict[str, Any] = {}

    def look() -> dict[str, Any]:
        check()
        state.update(compression.state_dict() if compression.is_bound else INACTIVE)
        if state.get("parameters"):
            require_sound(state)
        return {"step": state.get("step", 0)}

    agree_or_raise(
        transport,
        lambda: {"directory": os.path.abspath(folder)},
        "arguments of save_checkpoint()",
        advice="Give every rank the same directory",
    )
    compression.average(optimizer)
    _agree(transport, look, "save")
    token = gather_values(transport, secrets.token_hex(8))[0]
    own = _rank_file(main, token, rank, size)

    def write_main() -> None:
        if rank == 0:
            _write(main, {"token": token, "size": size, **content()}, token)

    try:
        _agree(transport, lambda: _write(own, {**state, "token": token}, token), "write the compressor's state")
        _agree(transport, write_main, "write the checkpoint")
    except Exception:
        with contextlib.suppress(LayoutError, OSError):  # an unreadable main file may name this file
            if _token_and_size_in(main)[0] != token:  # rank 0 may have completed it
                _delete(own)
        raise
    _delete_others(main, token, rank, size)


def _delete_others(main: Path, token: str, rank: int, size: int) -> None:
    """Delete this rank's files of older checkpoints and of interrupted saves, if the folder can be read."""
    ranks_file = rf"{_RANKS_FILES[main.name]}-(?P<token>{_TOKEN})-(?P<rank>\d+)-of-\d+\.pt"
    files = re.compile(rf"({re.escape(main.name)}|{ranks_file})(?P<draft>\.{_TOKEN}\.partial)?")
    paths: list[Path] = []
    with contextlib.suppress(OSError):  # the new checkpoint is complete
        paths.extend(main.parent.iterdir())
    for path in paths:
        found = files.fullmatch(path.name)
        if found and int(found["rank"] or 0) % size == rank and (found["draft"] or found["token"] not in (None, token)):
            _delete(path)


def _delete(path: Path) -> None:
    """Delete a file if that is possible; the new checkpoint is complete even if the file stays."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _rank_file(main: Path, token: str, rank: int, size: int) -> Path:
    return main.with_name(f"{_RANKS_FILES[main.name]}-{token}-{rank:05d}-of-{size:05d}.pt")


def _packed_state(compression: DGCCompressor) -> np.ndarray:
    return packed(compression.state_dict(), "the compressor's state")


def _write(path: Path, content: object, token: str) -> None:
    """Write a file completely or not at all, with checksums, even if a user has turned them off in torch."""

    def write(file: BinaryIO) -> None:
        with _checksums():
            try:
                torch.save(content, file)
            except RuntimeError:
                file.flush()  # this raises the actual error, because data is still in the buffer
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


def _require_loadable(extra: object) -> None:
    """Refuse objects that ``load_checkpoint`` would refuse later: loading runs no code from a file."""
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except Exception as error:
        buffer.seek(0)
        raise TypeError(
            "extra= holds something else than numbers, strings, tensors and containers of them, and this cannot "
            f"be loaded safely; convert it (float(x), vars(args)): {_why_refused(buffer, error)}"
        ) from error


# -- loading -----------------------------------------------------------------------------------------------------------


def _load(compression: DGCCompressor, states: list[Any]) -> None:
    """Load the result of :func:`_fitting_states`. Collective."""
    alone = compression.engine is None
    compression.load_state_dict(states if alone else states[0], resize=alone)


def _fitting_states(
    main: Path, token: str, size: int, compression: DGCCompressor, transport: Transport, resize: bool
) -> list[Any]:
    """Return this rank's own state in a list. For a single process return the states of all ranks that saved."""
    states = _read_states(main, token, size, transport, resize)
    same = size == transport.size
    try:
        own = compression.fitting_state(states[transport.rank] if same else states, resize=not same)
    except LayoutError as error:
        name = _rank_file(main, token, transport.rank, size).name if same else "the ranks' files"
        raise LayoutError(f"{name} in {main.parent}: {error}") from error
    return states if compression.engine is None else [own]


def _token_and_size_in(main: Path) -> tuple[str, int]:
    """Return the token and the number of ranks in a main file; ("", 0) if there is no main file.

    Raises:
        LayoutError: the file cannot be read, or is of another kind.
    """
    if not main.exists():
        return "", 0
    content = _read(main, "", mmap=True)
    if not _names_files(content):
        raise LayoutError(f"{main} is a file of another kind: {_FOREIGN}")
    return content["token"], content["size"]


def _names_files(content: object) -> bool:
    """Return whether a main file holds a number of ranks, and a token that is safe as a part of paths."""
    if not isinstance(content, dict):
        return False
    size, token = content.get("size"), content.get("token")
    return type(size) is int and size > 0 and isinstance(token, str) and bool(re.fullmatch(_TOKEN, token))


def _read(path: Path, advice: str, map_location: MAP_LOCATION = "cpu", mmap: bool = False) -> dict[str, Any]:
    """Compare a file's checksums, which torch does not do, and load it."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: {advice}")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
    except Exception as error:  # zipfile and zlib raise all kinds of errors
        raise LayoutError(
            f"{path} is empty, damaged or cut off, or {_FOREIGN} ({error}); take another copy, or an earlier one"
        ) from error
    try:
        content = torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except Exception as error:  # torch also raises all kinds of errors
        raise LayoutError(
            f"{path} cannot be loaded: {_FOREIGN}, or by a newer version ({_why_refused(path, error)})"
        ) from error
    if not isinstance(content, dict):
        raise LayoutError(f"{path} holds a {type(content).__name__}: {_FOREIGN}")
    return content


def _read_main(folder: Path, map_location: MAP_LOCATION) -> dict[str, Any]:
    path = folder / _MAIN_FILE
    advice = "there is no checkpoint in this directory; name the one that was given to save_checkpoint()"
    content = _read(path, advice, map_location)
    if not _names_files(content) or not {"model", "optimizer", "extra"} <= set(content):
        raise LayoutError(
            f"{path} is a checkpoint of another kind: {_FOREIGN}. Load it with torch.load() into model and optimizer "
            "on rank 0, and broadcast first the optimizer's state, then the parameters; the compressor begins with "
            "empty residuals"
        )
    return content


def _read_states(main: Path, token: str, old: int, transport: Transport, resize: bool) -> list[Any]:
    """Read the states of ``old`` ranks in rank order; None for states that this rank does not need."""
    if old != transport.size and not resize:
        raise LayoutError(
            f"the checkpoint in {main.parent} was saved by {old} ranks, this job has {transport.size}; pass "
            "resize=True to redistribute the residuals"
        )
    states: list[Any] = [None] * old
    advice = (
        "put all files of the checkpoint into a directory that every rank can read: each rank saves its own residuals"
    )
    for r in needed_ranks(transport.rank, old, transport.size):
        path = _rank_file(main, token, r, old)
        state = tree_map_only(torch.Tensor, torch.Tensor.numpy, _read(path, advice, mmap=True))
        if state.pop("token", token) != token or (state.get("rank"), state.get("size")) != (r, old):
            raise LayoutError(
                f"{path} was renamed: it holds the state of rank {state.get('rank')} of {state.get('size')}, or "
                "belongs to another checkpoint; restore the files' original names"
            )
        states[r] = state
    return states


def _why_refused(file: Path | BinaryIO, error: Exception) -> str:
    """Return why ``torch.load`` did not load a file, without torch's advice to run code from the file."""
    if not isinstance(error, pickle.UnpicklingError):
        return str(error).splitlines()[0]
    try:
        kinds = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # the file is damaged
        kinds = []
    return f"it holds {', '.join(kinds[:_SHOWN])}" if kinds else "it holds something else than numbers and tensors"
