"""Letters: their numbers, what a network's scores say, and how far that is from the truth."""

from __future__ import annotations

import numpy as np

BLANK = 0
ALPHABET = "abcdefghijklmnopqrstuvwxyz "
"""Letter i has the number i + 1; 0 is CTC's blank."""
CLASSES = len(ALPHABET) + 1


def numbers_of(text: str) -> np.ndarray:
    """uint8 numbers of a text's letters.

    Raises:
        ValueError: a letter is not in the alphabet.
    """
    return np.array([ALPHABET.index(letter) + 1 for letter in text], np.uint8)


def text_of(numbers: np.ndarray) -> str:
    """The text of letters' numbers."""
    return "".join(ALPHABET[number - 1] for number in numbers)


def greedy(best: np.ndarray) -> np.ndarray:
    """CTC's best path (Graves et al. 2006): repetitions are one letter, then blanks go.

    Args:
        best: (frames,) the class of the highest score in each.

    Returns:
        Numbers of letters.
    """
    kept = np.ones(len(best), bool)
    kept[1:] = best[1:] != best[:-1]
    return best[kept & (best != BLANK)]


def edits(given: np.ndarray, wanted: np.ndarray) -> int:
    """Levenshtein's distance: how many letters have to be put in, taken out or replaced at least."""
    row = np.arange(len(wanted) + 1)
    for place, letter in enumerate(given):
        # From above and from the diagonal at once; from the left by a running minimum, since each step costs 1.
        reached = np.append(place + 1, np.minimum(row[1:] + 1, row[:-1] + (wanted != letter)))
        row = np.minimum.accumulate(reached - np.arange(len(row))) + np.arange(len(row))
    return int(row[-1])
