"""A transport among nodes, on ranks that are threads."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from dgc.core.collectives import Transport, as_transport
from dgc.errors import ConfigError, TransportError
from dgc.transport.hierarchical import HierarchicalTransport, between_nodes
from dgc.transport.local import LocalTransport, run_ranks


def test_one_message_of_each_node_comes_to_every_rank():
    def rank(transport):
        over = HierarchicalTransport(transport, [0, 0, 2, 2, 2])
        assert isinstance(over, Transport)
        for length in (0, 1, 1000):
            out = np.zeros((2, length), np.uint8)
            over.allgather(np.full(length, over.rank + 5, np.uint8), out)
            assert (out == np.array([[5], [6]])).all()
        return over.rank, over.size, over.inside.rank, over.inside.size

    assert run_ranks(5, rank) == [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 3), (1, 2, 1, 3), (1, 2, 2, 3)]


def test_each_node_deals_one_message():
    def rank(transport):
        over = HierarchicalTransport(transport, [0, 0, 2, 2, 2])
        assert over.has_alltoall
        out = np.zeros((2, 7), np.uint8)
        over.alltoall(np.repeat(np.array([[1], [2]], np.uint8) + 10 * over.rank, 7, axis=1), out)
        assert (out[:, 0] == [over.rank + 1, over.rank + 11]).all()

    run_ranks(5, rank)


def test_a_sum_counts_each_node_once_and_a_maximum_every_rank():
    def rank(transport):
        over = HierarchicalTransport(transport, [0, 0, 2])
        array = np.full(10, over.rank + 1, np.float32)
        over.allreduce(array)
        assert (array == 3).all()
        array[:] = [transport.rank == 1] * 10
        over.allreduce(array, "max")
        assert (array == 1).all()

    run_ranks(3, rank)


@pytest.mark.parametrize(("who", "node", "longer"), [(3, 1, 0), (1, 0, 1)])
@pytest.mark.parametrize("collective", ["allgather", "alltoall"])
def test_another_message_within_a_node_is_an_error_of_every_rank(collective, who, node, longer):
    def rank(transport):
        over = HierarchicalTransport(transport, [0, 0, 2, 2])
        size = 9 + longer * (transport.rank == who)
        message = np.full((2, size), transport.rank == who, np.uint8)
        text = rf"rank {who} has another message than the first rank of its node \({node}\)"
        with pytest.raises(TransportError, match=text):
            getattr(over, collective)(message[0] if collective == "allgather" else message, np.zeros_like(message))

    run_ranks(4, rank)


class Torn:
    """What connects the leaders, and fails on one of them."""

    def __init__(self, across, fails):
        self.across, self.fails = across, fails

    def allgather(self, message, out):
        self.across.allgather(message, out)
        if self.fails:
            raise TransportError("the cable is out")

    def allreduce(self, array, op="sum"):
        self.across.allreduce(array, op)
        if self.fails:
            raise TransportError("the cable is out")


def test_what_a_leader_meets_is_met_by_its_node_and_the_next_collective_works():
    def rank(transport):
        over = HierarchicalTransport(transport, [0, 0, 2, 2])
        if over._across is not None:
            over._across = torn = Torn(over._across, transport.rank == 2)

        def gathers():
            out = np.zeros((2, 5), np.uint8)
            over.allgather(np.full(5, over.rank + 1, np.uint8), out)
            assert (out == [[1], [2]]).all()

        def sums():
            array = np.ones(5, np.float32)
            over.allreduce(array)
            assert (array == 2).all()

        for collective in (gathers, sums):
            if over.rank == 0:
                collective()
                continue
            with pytest.raises(
                TransportError, match="the cable is out" if transport.rank == 2 else "rank 2: the cable"
            ):
                collective()
        if transport.rank == 2:
            torn.fails = False
        gathers()
        sums()

    run_ranks(4, rank)


def test_nodes_that_come_with_messages_of_other_sizes_are_told():
    """Where the transport does not notice: what it leaves is another message's, or nothing."""

    class Short:
        def allgather(self, message, out):
            out[0] = message
            out[1, 8:16] = np.array([7], np.int64).view(np.uint8)

    def rank(transport):
        over = HierarchicalTransport(transport, [0, 0])
        if over._across is not None:
            over._across, over.size = Short(), 2
        over.size = 2
        with pytest.raises(TransportError, match="messages of different sizes"):
            over.allgather(np.zeros(9, np.uint8), np.zeros((2, 9), np.uint8))

    run_ranks(2, rank)


def test_what_the_core_asks_of_a_transport():
    def rank(transport):
        assert transport.inside is None
        assert transport.whole is transport
        assert transport.rank_info() == {"rank": transport.rank, "size": 4}
        assert transport.label(1) == "rank 1"
        over = HierarchicalTransport(transport, [0, 0, 2, 2])
        assert over.inside.size == 2
        assert over.whole is transport
        assert over.rank_info() == {"rank": transport.rank, "size": 4, "nodes": 2}
        assert over.label(1) == "node 1"

    run_ranks(4, rank)


class OnMachines(LocalTransport):
    """Ranks on machines of their own."""

    def nodes(self):
        return self.machines


def over(machines, hierarchical):
    """The number of nodes on each rank, None for the flat transport."""

    def rank(transport):
        transport.__class__ = OnMachines
        transport.machines = machines
        made = between_nodes(transport, hierarchical)
        return None if made is transport else made.size

    return run_ranks(len(machines), rank)


def test_nodes_are_machines_or_groups_of_neighbours():
    assert over([0, 0, 2, 2], False) == [None] * 4
    assert over([0], True) == over([0], 4) == [None]
    assert over([0, 0, 2, 2], True) == [2] * 4
    assert over([0, 0, 2, 2], "auto") == [2] * 4
    assert over([0, 0, 0, 3], "auto") == [2] * 4
    assert over([0, 1, 2, 3], True) == [4] * 4
    assert over([0, 0, 0, 0, 0, 0], 3) == [2] * 6


def test_auto_makes_no_nodes_where_they_would_save_nothing(caplog):
    with caplog.at_level(logging.WARNING, logger="dgc"):
        assert over([0, 0, 0, 0], "auto") == [None] * 4
        assert over([0, 1, 2, 3], "auto") == [None] * 4
        assert not caplog.records
        assert over([0, 0, 0, 0], True) == [1] * 4
    assert ["nothing is sent between nodes" in r.getMessage() for r in caplog.records] == [True]


def test_what_cannot_be_a_node_is_refused_on_all_ranks():
    with pytest.raises(ConfigError, match="does not divide 4 ranks"):
        over([0, 0, 0, 0], 3)
    with pytest.raises(ConfigError, match="needs the ranks of a node to be neighbours"):
        over([0, 1, 0, 1], True)

    flat = as_transport(SimpleNamespace(rank=0, size=2, name="flat", allgather=None, allreduce=None, close=None))
    assert between_nodes(flat, "auto") is flat
    for asked in (True, 2):
        with pytest.raises(ConfigError, match="needs MPI"):
            between_nodes(flat, asked)
