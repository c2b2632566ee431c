"""The application: who gets which utterances, and how errors are counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from evidence.applications.speech import ERRORS, ON_RECORDINGS, Speech
from evidence.speech import recordings
from evidence.speech.decoding import CLASSES
from evidence.speech.features import WIDTH


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """At its smallest, without recordings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(recordings, "FOLDERS", ())
        Speech.prepare("tiny")
        yield Speech("tiny", 3)


def rows(speech, epoch, size):
    """All utterances of an epoch's steps, in any order within a step: their letters and lengths."""
    steps = []
    for step in zip(*(speech.batches(epoch, rank, size) for rank in range(size)), strict=True):
        found = []
        for frames, lengths, letters, spelled in step:
            assert frames.dtype == torch.float32
            assert frames.shape == (lengths.max(), len(lengths), WIDTH)
            pieces = letters.split(spelled.tolist())
            found += [(tuple(p.tolist()), int(n)) for p, n in zip(pieces, lengths, strict=True)]
        steps.append(sorted(found))
    return steps


def test_ranks_share_each_step(speech):
    alone = rows(speech, 1, 1)
    assert len(alone) == speech.steps(1) == speech.steps(2) >= 2
    assert rows(speech, 1, 2) == alone
    assert rows(speech, 1, 4) == alone
    assert rows(speech, 2, 1) != alone


def test_an_epoch_can_be_repeated(speech):
    for first, again in zip(speech.batches(1, 0, 2), speech.batches(1, 0, 2), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


class Knowing(nn.Module):
    """Says of each utterance what it was told, one letter after the other with a blank between."""

    def __init__(self, known):
        super().__init__()
        self.known = known
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, frames):
        scores = torch.zeros(len(frames), frames.shape[1], CLASSES)
        scores[..., 0] = 1
        for number in range(frames.shape[1]):
            letters = self.known[frames[:, number].numpy().tobytes()]
            scores[torch.arange(len(letters)) * 2, number, letters] = 2
        return scores


def test_errors_are_counted_once_each(speech):
    test = speech._tests[ERRORS]
    known = {test.frames(np.array([n]))[:, 0].numpy().tobytes(): test.letters(n).long() for n in range(len(test))}
    letters = sum(len(found) for found in known.values())
    model = Knowing(known)
    for size in (1, 2, 3):
        shares = [speech.evaluate(model, rank, size)[ERRORS] for rank in range(size)]
        assert sum(edits for edits, _ in shares) == 0
        assert sum(count for _, count in shares) == letters
    first = next(iter(known))
    known[first] = known[first][:-1]
    assert speech.evaluate(model, 0, 1)[ERRORS] == (1.0, letters)


def test_recordings_are_a_second_test(speech):
    assert [metric.name for metric in speech.metrics] == [ERRORS]
    assert "were not there (Debian's asterisk-core-sounds-en-wav)" in speech.facts()["data"]
    assert speech.facts().keys() == {"data", "model", "training"}
    assert ON_RECORDINGS not in speech._tests
