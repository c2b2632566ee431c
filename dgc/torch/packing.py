"""Pack content that ranks send to each other between steps, such as optimizer states, into bytes.

The content may be tensors, numbers and texts in plain containers. Unpacking runs no code of the sender.
"""

from __future__ import annotations

import io
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import torch
from torch.serialization import MAP_LOCATION
from torch.utils._pytree import tree_leaves

from dgc.adapter.agreement import built_together
from dgc.core.collectives import Transport, gather_values
from dgc.errors import ConfigError
from dgc.torch.distributed import TorchJob

_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CHUNK = 1 << 22  # bytes of each rank that are gathered at a time


def packed(content: object, owner: str) -> np.ndarray:
    """Return content as (n,) uint8. Errors name its ``owner``.

    Raises:
        ConfigError: the content holds an object that only pickle could carry.
    """
    for leaf in tree_leaves(content, is_leaf=lambda value: type(value) not in _CONTAINERS):
        if not isinstance(leaf, torch.Tensor) and type(leaf) not in _PLAIN:
            raise ConfigError(
                f"{owner} holds a {type(leaf).__name__}, which is not sent to other ranks: let it hold tensors, "
                "numbers, and dictionaries and lists of them"
            )
    file = io.BytesIO()
    torch.save(content, file)
    return np.frombuffer(file.getbuffer(), np.uint8)


def unpacked(data: Any, map_location: MAP_LOCATION = "cpu") -> Any:
    """Return the content of bytes that :func:`packed` made, here or on another rank.

    Args:
        data: (n,) uint8, or bytes.
        map_location: as in ``torch.load``.
    """
    return torch.load(io.BytesIO(memoryview(data)), map_location=map_location, weights_only=True)


def gather_packed(transport: Transport, own: np.ndarray, root: int = 0) -> list[np.ndarray]:
    """Return every rank's bytes, (n_r,) uint8, on the rank ``root``, and nothing on the others. Collective."""
    sizes = gather_values(transport, own.size)
    gathered = built_together(transport, lambda: [np.empty(n, np.uint8) for n in sizes if transport.rank == root])
    for start in range(0, max(sizes), _CHUNK):
        chunk = np.zeros(min(_CHUNK, max(sizes) - start), np.uint8)
        chunk[: max(0, own.size - start)] = own[start : start + chunk.size]
        chunks = transport.gather(chunk, root)
        for array, piece in zip(gathered, chunks, strict=bool(gathered)):
            array[start : start + chunk.size] = piece[: max(0, array.size - start)]
    return gathered


def broadcast_packed(job: TorchJob, own: np.ndarray, root: int, device: torch.device | str = "cpu") -> np.ndarray:
    """Return the bytes of the rank ``root`` on all ranks. Collective.

    They are sent from ``device``, because a process group of NCCL accepts no tensors in host memory.
    """
    size = job.gather(own.size, "packed")[root]
    content = torch.from_numpy(own) if job.rank == root else torch.empty(size, dtype=torch.uint8)
    content = content.to(device)
    job.broadcast([("dgc.packed", root, content)])()
    return content.cpu().numpy()
