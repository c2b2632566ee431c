"""Groups of ranks that exchange as one: the ranks of a node share memory, and only one message leaves it.

P = number of nodes, m = message bytes. All ranks of a node have the same message. The node's lowest rank, its *leader*,
exchanges this message with the leaders of the other nodes, and broadcasts their messages within the node.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable

import numpy as np
from typing_extensions import override

from dgc.core.collectives import (
    Divisible,
    Transport,
    check_allgather,
    check_allreduce,
    check_alltoall,
    gather_rows,
)
from dgc.errors import ConfigError, TransportError

logger = logging.getLogger("dgc")

# Bytes of the two int64 before a leader's message. First: 0, or 1 + the first rank of the node whose message differs
# from the leader's. Second: the message's size.
_HEAD = 16
_TEXT = 1000  # the most bytes of an error's text that a leader sends to its node
_WHY = (
    "it met an error, which it shows itself; or only some ranks gave up a step or loaded a state; or learning rate, "
    "momentum, loss scale or parameters differ"
)


def between_nodes(transport: Transport, hierarchical: bool | int | str) -> Transport:
    """Return the transport that carries gradients. Collective.

    Args:
        transport: connects all ranks.
        hierarchical: False: return ``transport``. True: return a transport between nodes. "auto": do so only if there
            are several nodes, and several ranks on at least one of them. A number n: return a transport between groups
            of n neighbouring ranks.
    """
    if hierarchical is False or transport.size == 1:
        return transport
    size, by_machine = transport.size, isinstance(hierarchical, (bool, str))
    nodes = transport.nodes() if by_machine and isinstance(transport, Divisible) else None
    if not isinstance(transport, Divisible) or (by_machine and nodes is None):
        if hierarchical == "auto":
            return transport
        raise ConfigError(
            f"hierarchical={hierarchical!r} needs MPI, and gradients are sent over {transport.name!r} here: start the "
            "job with horovodrun --mpi (and mpi4py installed), or leave hierarchical out"
        )
    if nodes is None:
        neighbours = int(hierarchical)
        if size % neighbours:
            raise ConfigError(f"hierarchical={hierarchical} does not divide {size} ranks into groups of {hierarchical}")
        nodes = [rank - rank % neighbours for rank in range(size)]
    count = len(set(nodes))
    if hierarchical == "auto" and count in (1, size):
        return transport
    if count == 1 and transport.rank == 0:
        logger.warning(
            "hierarchical=%s: all %d ranks are on one node. Gradients are sparsified, but nothing is sent between "
            "nodes: use hierarchical='auto', which ignores nodes in such a job",
            hierarchical,
            size,
        )
    if any(nodes[i] > nodes[i + 1] for i in range(size - 1)):
        places = ", ".join(str(nodes.index(n)) for n in dict.fromkeys(nodes))
        raise ConfigError(
            f"hierarchical={hierarchical!r} needs the ranks of a node to be neighbours, and the nodes that begin with "
            f"ranks {places} are mixed: place ranks by node (horovodrun does; mpirun --map-by slot)"
        )
    return HierarchicalTransport(transport, nodes)


class HierarchicalTransport(Transport):
    """A transport between nodes. All ranks of a node must make the same calls with the same arguments.

    Attributes:
        rank: this node's number.
        size: the number of nodes, P.
        inside: connects the ranks of this node.
    """

    inside: Divisible

    def __init__(self, whole: Divisible, nodes: list[int]) -> None:
        """Make the transports within the nodes and between them. Collective over all ranks."""
        firsts = sorted(set(nodes))
        first = nodes[whole.rank]
        self._whole = whole
        self.rank = firsts.index(first)
        self.size = len(firsts)
        self.name = f"{whole.name}, between nodes"
        self.inside = whole.split(first)
        # A split puts every rank into a group. The group of those that are no leaders is not used.
        across = whole.split(0 if self.inside.rank == 0 else 1)
        self._across: Transport | None = across if self.inside.rank == 0 else None
        if self._across is None:
            across.close()
        self._first = first
        self._buffers: dict[tuple[int, int], np.ndarray] = {}

    @override
    def allgather(self, message: np.ndarray, out: np.ndarray) -> None:
        """Copy every node's message into ``out``. If ranks of a node have different messages, raise on all ranks."""
        check_allgather(message, out, self.size)
        self._exchange(message[None], out, lambda across, own, came: across.allgather(own[0], came))

    @override
    def alltoall(self, message: np.ndarray, out: np.ndarray) -> None:
        """Send parts of every node's message. If ranks of a node have different messages, raise on all ranks."""
        check_alltoall(message, out, self.size)
        self._exchange(message, out, lambda across, own, came: across.alltoall(own, came))

    @property
    @override
    def has_alltoall(self) -> bool:
        return self._whole.has_alltoall

    def _exchange(
        self, message: np.ndarray, out: np.ndarray, collective: Callable[[Transport, np.ndarray, np.ndarray], None]
    ) -> None:
        """Let the leader exchange the message, (n, m) parts, and copy the received ones to all ranks of the node."""
        parts, size = message.shape
        if (parts, size) not in self._buffers:
            self._buffers[parts, size] = np.zeros((parts + self.size, _HEAD + size), np.uint8)
        own, came = np.split(self._buffers[parts, size], [parts])
        different = self._first_that_differs(message)
        own[:, :_HEAD].view(np.int64)[:] = different, size
        own[:, _HEAD:] = message

        def between_leaders(across: Transport) -> None:
            came[:, :_HEAD] = 0
            collective(across, own, came)
            if (came[:, 8:_HEAD].copy().view(np.int64)[:, 0] != size).any():
                raise TransportError(
                    "the nodes have messages of different sizes: they are in different steps, or make different calls; "
                    "every rank must make the same steps, the same calls to reset() and the same loads, in the same "
                    "order"
                )

        self._by_leader(between_leaders)
        if different:  # a rank with another message may have a buffer of another size
            raise _unlike(different - 1, self.rank)
        self.inside.broadcast(came)
        for node, word in enumerate(came[:, :8].copy().view(np.int64)[:, 0].tolist()):
            if word:
                raise _unlike(word - 1, node)
        np.copyto(out, came[:, _HEAD:])

    @override
    def allreduce(self, array: np.ndarray, op: str = "sum") -> None:
        """Reduce ``array`` in place. A sum counts each node once, because its ranks have equal arrays."""
        check_allreduce(array, op)
        if op == "max":
            self.inside.allreduce(array, op)
        self._by_leader(lambda across: across.allreduce(array, op))
        self.inside.broadcast(array)

    @property
    @override
    def whole(self) -> Transport:
        return self._whole

    @override
    def rank_info(self) -> dict[str, int]:
        return {"rank": self._whole.rank, "size": self._whole.size, "nodes": self.size}

    @override
    def end_job(self, error: Exception) -> None:
        self._whole.end_job(error)

    @override
    def close(self) -> None:
        """Close the transports within and between nodes, on every rank; ``whole`` stays open."""
        if self._across is not None:
            self._across.close()
        self.inside.close()

    def _by_leader(self, collective: Callable[[Transport], None]) -> None:
        """Run ``collective`` on the leader, and raise its error on all ranks of the node."""
        said, failure = np.zeros(1 + _TEXT, np.uint8), None
        if self._across is not None:
            try:
                collective(self._across)
            except TransportError as error:
                failure, text = error, str(error).encode()[:_TEXT]
                said[0] = 1
                said[1 : 1 + len(text)] = np.frombuffer(text, np.uint8)
        self.inside.broadcast(said)
        if failure is not None:
            raise failure
        if said[0]:
            raise TransportError(f"rank {self._first}: {bytes(said[1:]).rstrip(bytes(1)).decode(errors='replace')}")

    def _first_that_differs(self, message: np.ndarray) -> int:
        """Return 1 + the first rank of this node whose message differs from the leader's, or 0."""
        own = np.array([message.size, zlib.crc32(message.data)], np.int64)
        rows = gather_rows(self.inside, own.view(np.uint8))
        others = np.flatnonzero((rows != rows[0]).any(axis=1))
        return 1 + self._first + int(others[0]) if others.size else 0


def _unlike(rank: int, node: int) -> TransportError:
    return TransportError(f"rank {rank} has another message than the first rank of its node ({node}): {_WHY}")
