"""The warm-up: its sparsity in every step, and how many entries that is."""

from dgc.core.config import Schedule, entries_to_send


def test_schedule_is_paddles_table():
    five = (0.75, 0.9375, 0.984375, 0.996, 0.999)
    schedule = Schedule(five, begin=0, length=100)
    expected = [five[min(step // 20, 4)] for step in range(120)]
    assert [round(1 - schedule.density(step), 9) for step in range(120)] == [round(s, 9) for s in expected]
    one_each = Schedule(five, begin=3, length=5)
    assert [one_each.is_dense(s) for s in range(4)] == [True, True, True, False]
    assert [round(1 - one_each.density(3 + s), 9) for s in range(7)] == [*(round(s, 9) for s in five), 0.999, 0.999]
    assert one_each.ramp_end() == 7
    jump = Schedule((0.5, 0.9), begin=0, length=1)
    assert (jump.density(0), round(jump.density(1), 9)) == (0.5, 0.1)


def test_k_is_what_a_reader_computes_by_hand():
    assert entries_to_send(1000, 1 - 0.999) == 1
    assert entries_to_send(1000, 1 - 0.9) == 100
    assert entries_to_send(2000, 1 - 0.999) == 2
    assert entries_to_send(10, 0.001) == 1
    assert entries_to_send(0, 0.5) == 0
    assert entries_to_send(7, 1.0) == 7
