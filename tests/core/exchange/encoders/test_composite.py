"""An encoder made of encoders hands every call to the member in turn."""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from dgc.core.config.schedule import Schedule
from dgc.core.exchange.encoders.base import Encoder
from dgc.core.exchange.encoders.composite import CompositeEncoder, Member

FIRST = (0, 3, 10)
IN_TURN = {0: 0, 2: 0, 3: 1, 9: 1, 10: 2, 1000: 2}
OF_A_STEP = (
    *("await_gradients", "begin", "abandon", "compress", "catch_up", "apply", "finish", "commit", "why_empty"),
)
ARGUMENTS = {
    "await_gradients": 0,
    "compress": 0,
    "catch_up": 0,
    "apply": 2,
    "finish": 0,
    "commit": 1,
    "why_empty": 0,
}
"""Beside the step."""


def composite():
    members = [
        Member(first, Mock(spec=Encoder), Schedule((0.5, 0.9 + place / 100), begin=0, length=4))
        for place, first in enumerate(FIRST)
    ]
    return CompositeEncoder(members), [member.encoder for member in members]


def test_no_method_of_an_encoder_is_forgotten():
    methods = {name for name in vars(Encoder) if callable(getattr(Encoder, name)) and not name.startswith("_")}
    assert methods == {*OF_A_STEP, "plan", "plan_at", "check_sizes"}
    own = set(vars(CompositeEncoder))
    # Without an early begin there is nothing to begin or to abandon.
    assert not CompositeEncoder.begins_early
    assert methods - own == {"begin", "abandon"}


@pytest.mark.parametrize(("number", "turn"), IN_TURN.items())
@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_member_in_turn_gets_the_call(name, number, turn):
    encoder, members = composite()
    first = SimpleNamespace(step=number, density=0.1)
    if name != "await_gradients":
        first = Mock(step=first, state=Mock(thresholds=np.ones(3)))
    arguments = [Mock() for _ in range(ARGUMENTS[name])]
    options = {"refused": True} if name == "finish" else {}
    result = getattr(encoder, name)(first, *arguments, **options)
    getattr(members[turn], name).assert_called_once_with(first, *arguments, **options)
    assert all(not member.method_calls for place, member in enumerate(members) if place != turn)
    if name in ("commit", "why_empty"):
        assert result is getattr(members[turn], name).return_value


@pytest.mark.parametrize(("number", "turn"), IN_TURN.items())
def test_plans_follow_the_schedule_of_the_member_in_turn(number, turn):
    encoder, members = composite()
    encoder.plan(SimpleNamespace(step=number, density=0.123))
    members[turn].plan_at.assert_called_once_with(encoder.members[turn].schedule.density(number))
    encoder.plan(SimpleNamespace(step=number, density=None))
    members[turn].plan_at.assert_called_with(None)


@pytest.mark.parametrize("number", [0, 2, 3, 4, 10, 11])
def test_what_one_member_remembers_is_nothing_to_the_next(number):
    encoder, _ = composite()
    state = SimpleNamespace(thresholds=np.ones((2, 3)))
    encoder.compress(Mock(step=SimpleNamespace(step=number, density=0.1), state=state))
    assert np.isnan(state.thresholds).all() == (number in FIRST[1:])


def test_sizes_are_checked_for_every_member():
    encoder, members = composite()
    encoder.check_sizes((0.99,))
    for member, mock in zip(encoder.members, members, strict=True):
        mock.check_sizes.assert_called_once_with(member.schedule.sparsity)
