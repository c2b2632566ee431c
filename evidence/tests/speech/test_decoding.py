"""Letters, CTC's best path and edit distances."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest

from evidence.speech.decoding import ALPHABET, BLANK, CLASSES, edits, greedy, numbers_of, text_of

A, B, C = 1, 2, 3


def test_letters_have_numbers():
    assert numbers_of("abz ").tolist() == [1, 2, 26, 27]
    assert text_of(numbers_of("one moment please")) == "one moment please"
    assert CLASSES == len(ALPHABET) + 1
    with pytest.raises(ValueError, match="substring not found"):
        numbers_of("o'clock")


@pytest.mark.parametrize(
    ("best", "letters"),
    [
        ([BLANK, BLANK], []),
        ([A, A, A], [A]),
        ([A, BLANK, A], [A, A]),
        ([BLANK, A, A, B, BLANK, B, C, C, BLANK], [A, B, B, C]),
        ([], []),
    ],
)
def test_the_best_path(best, letters):
    assert greedy(np.array(best, np.int64)).tolist() == letters


def distance(given, wanted):
    """By the definition."""

    @cache
    def of(i, j):
        if i == 0 or j == 0:
            return i + j
        return min(of(i - 1, j) + 1, of(i, j - 1) + 1, of(i - 1, j - 1) + (given[i - 1] != wanted[j - 1]))

    return of(len(given), len(wanted))


def test_distances_are_those_of_the_definition():
    draw = random.Random(1)
    for _ in range(200):
        given, wanted = ("".join(draw.choices("abc", k=draw.randrange(8))) for _ in range(2))
        assert edits(numbers_of(given), numbers_of(wanted)) == distance(given, wanted), (given, wanted)
