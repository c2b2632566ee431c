"""A bucket's message between ranks: what one wrote all read, and what does not belong together is an error."""

import numpy as np
import pytest

from dgc import errors
from dgc.core.compressors import make_config
from dgc.core.exchange.choice import entry_plan
from dgc.core.layout import Parameter, make_layout
from dgc.core.message import HEADER_BYTES, MIN_MESSAGE_BYTES, Flags, Incoming, Messages, RemoteFailure
from dgc.transport.local import run_ranks

RANKS = 3
BUCKET, STEP = 0, 7
LAYOUT = make_layout([Parameter("w", (40, 50), "float32"), Parameter("b", (9,), "float32")], make_config({}))
CODECS = {"indices": "uint16", "values": "float32", "small": "float32"}
PLAN, DENSE = (
    entry_plan(LAYOUT.buckets[0], make_config(CODECS), density, RANKS, has_alltoall=False) for density in (0.01, None)
)


def entries_of(rank):
    """What a rank sends: positions, values, dense vector."""
    rng = np.random.default_rng(rank)
    positions = np.sort(rng.choice(2000, PLAN.form.count - rank, replace=False))
    return positions, rng.standard_normal(positions.size).astype(np.float32), rng.standard_normal(PLAN.vector.size)


def write(sender, rank, step=STEP, fingerprint=5, joined=0):
    positions, values, vector = entries_of(rank)
    sender.start(step, fingerprint)
    PLAN.encoder.codec.encode(positions, values, sender.payload)
    sender.inline[:] = vector.astype(np.float32).view(np.uint8)
    sender.finish(count=len(positions), nonfinite=rank == 1, joined=joined)


def exchanged(act, form=PLAN.form):
    """What each rank received, or its error, when ``act(sender, rank)`` wrote its message."""

    def one_rank(transport):
        sender = Messages(form, BUCKET, transport)
        act(sender, transport.rank)
        sender.exchange()
        try:
            return sender.receive()
        except (errors.DGCError, RemoteFailure) as error:
            return error

    return run_ranks(RANKS, one_rank)


def test_all_ranks_read_what_each_one_wrote():
    assert PLAN.vector.is_inline
    for received in exchanged(write):
        assert [message.sender for message in received] == list(range(RANKS))
        for rank, message in enumerate(received):
            positions, values, vector = entries_of(rank)
            found = PLAN.encoder.codec.decode(message.payload, message.count)
            np.testing.assert_array_equal(found[0], positions)
            np.testing.assert_array_equal(found[1], values)
            np.testing.assert_array_equal(message.inline.view(np.float32), vector.astype(np.float32))
            assert message.nonfinite == (rank == 1)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.RemoteError, errors.RemoteError),
        (errors.LayoutError, errors.LayoutError),
        (errors.ConfigError, errors.ConfigError),
        (errors.WireError, errors.WireError),
        (errors.TransportError, errors.TransportError),
        (errors.DGCError, errors.RemoteError),
    ],
)
def test_an_error_of_one_rank_is_all_that_counts(error, kind):
    """Also beside ranks that have other options: the one that gave up may not have known this step's."""

    def act(sender, rank):
        write(sender, rank, fingerprint=rank)
        if rank == 1:
            sender.write_error(error("no such thing"), 3)

    for failure in exchanged(act):
        assert type(failure.error) is kind
        assert str(failure.error) == "rank 1 failed in step 7: no such thing"


def test_of_several_errors_that_of_the_lowest_rank_counts():
    def act(sender, rank):
        write(sender, rank)
        if rank != 0:
            sender.write_error(errors.WireError("damaged"), None)

    assert [str(failure) for failure in exchanged(act)] == ["rank 1 failed in step 7: damaged"] * RANKS


def test_a_long_error_is_cut_wherever_the_message_ends():
    """Letters of two bytes: one is cut in its middle."""

    def act(sender, rank):
        sender.start(STEP, 5)
        sender.write_error(errors.ConfigError("ä" * 10_000), None)

    for received in exchanged(act, DENSE.form):
        text = str(received.error).removeprefix("rank 0 failed in step 7: ")
        assert set(text) <= {"ä", "\ufffd"}
        assert text.count("ä") == (max(MIN_MESSAGE_BYTES, DENSE.form.nbytes) - HEADER_BYTES - 1) // 2


def test_a_shorter_error_shows_nothing_of_the_message_before():
    def act(sender, rank):
        sender.start(STEP, 5)
        sender.payload[:] = ord("x")
        sender.write_error(errors.ConfigError("short"), None)

    assert str(exchanged(act)[0].error) == "rank 0 failed in step 7: short"


def test_other_options_on_one_rank_are_an_error_that_says_what_to_do():
    found = exchanged(lambda sender, rank: write(sender, rank, fingerprint=5 + (rank == 2)))
    assert all(isinstance(error, errors.ConfigError) for error in found)
    for error, other in zip(found, (2, 2, 0), strict=True):
        assert f"rank {other} and rank" in str(error)
        assert "load a checkpoint on all ranks" in str(error)


def test_options_of_a_rank_that_has_joined_are_not_compared():
    """But those of the others are, and the step of all."""

    def joins(sender, rank, others=5, step=STEP):
        write(sender, rank, STEP if rank else step, others if rank else 6, joined=0 if rank else Flags.JOINED)

    for received in exchanged(joins):
        assert [message.joined for message in received] == [Flags.JOINED, 0, 0]
    for error in exchanged(lambda sender, rank: joins(sender, rank, others=5 + rank)):
        assert "rank 1 and rank 2 disagree" in str(error) or "rank 2 and rank 1 disagree" in str(error)
    assert all("step 8" in str(error) for error in exchanged(lambda sender, rank: joins(sender, rank, step=8))[1:])


def test_ranks_that_have_joined_with_other_divisors_are_an_error():
    flags = (Flags.JOINED, Flags.JOINED | Flags.BY_TRAINING, 0)
    for error in exchanged(lambda sender, rank: write(sender, rank, joined=flags[rank])):
        assert isinstance(error, errors.ConfigError)
        assert "divide_by" in str(error)


def test_a_message_of_another_step_is_refused():
    found = exchanged(lambda sender, rank: write(sender, rank, step=STEP + (rank == 1)))
    assert all(type(error) is errors.WireError for error in found)


def test_a_damaged_message_is_named_by_its_sender_and_bucket():
    nothing = np.empty(0, np.uint8)
    message = Incoming(2, "rank 2 for bucket 4", 0, False, nothing, nothing, nothing, 0)
    with pytest.raises(errors.WireError, match=r"^message of rank 2 for bucket 4: too short$"), message.blamed():
        raise errors.LayoutError("too short")
