"""What the trainers are made of."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch

from evidence.application import EvidenceError
from evidence.applications.digits import DigitsTraining
from evidence.applications.language import PIECES, Language
from evidence.data.images import prepare_digits
from evidence.trainers.optimizers import SeparateDecay, take_first_moment
from evidence.trainers.random_states import random_states, seed_all, set_random_states
from evidence.variants import VARIANTS


def test_a_decay_of_its_own_is_sgds_where_nothing_is_compressed():
    torch.manual_seed(0)
    start, gradients = torch.randn(50, dtype=torch.float64), torch.randn(30, 50, dtype=torch.float64)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    sgd = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=0.01)
    separate = SeparateDecay([ours], lr=0.1, decay=0.01, decay_momentum=0.9)
    velocity = torch.zeros_like(start)
    for gradient in gradients:
        theirs.grad = gradient.clone()
        sgd.step()
        velocity = 0.9 * velocity + gradient  # what a compressor at sparsity 0 hands over
        ours.grad = velocity.clone()
        separate.step()
    assert torch.allclose(ours, theirs, rtol=1e-12)


def test_all_random_numbers_go_on_where_they_were_through_a_file():
    def draw():
        return random.random(), np.random.random(), float(torch.rand(())), float(torch.randn(()))  # noqa: NPY002

    seed_all(3)
    draw()
    file = io.BytesIO()
    torch.save(random_states(), file)
    wanted = [draw() for _ in range(3)]
    seed_all(4)
    file.seek(0)
    set_random_states(torch.load(file, weights_only=True))
    assert [draw() for _ in range(3)] == wanted


def test_the_ranks_share_the_images_of_each_step_whatever_their_number():
    prepare_digits()
    application = DigitsTraining("tiny", 0)
    labels = {}
    for size in (1, 2, 4):
        shares = [list(application.array_batches(1, rank, size)) for rank in range(size)]
        steps = zip(*shares, strict=True)
        labels[size] = [np.concatenate([own for _, own in step]).tolist() for step in steps]
        assert len(labels[size]) == application.steps(size)
    assert labels[1] == labels[2] == labels[4]


def test_every_held_out_word_is_counted_once():
    Language.prepare("tiny")
    application = Language("tiny", 0)
    torch.manual_seed(0)
    model = application.make_model().eval()
    with torch.no_grad():
        whole = application.evaluate(model, 0, 1)["perplexity"]
        parts = [application.evaluate(model, rank, 3)["perplexity"] for rank in range(3)]
        assert application.evaluate(model, 40, 50)["perplexity"] == (0.0, 0.0)
    # Nothing predicts the first word of a piece.
    assert whole[1] == PIECES * (600 // PIECES - 1)
    assert sum(count for _, count in parts) == whole[1]
    assert abs(sum(total for total, _ in parts) - whole[0]) < 1e-3 * whole[1]


def test_adams_first_moment_becomes_the_compressors():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    adam = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.1}], betas=(0.8, 0.99))
    assert take_first_moment(adam) == 0.8
    assert [group["betas"] for group in adam.param_groups] == [(0.0, 0.99)] * 2
    assert take_first_moment(torch.optim.SGD(parameters, lr=0.1, momentum=0.9)) is None
    adam.param_groups[0]["betas"] = (0.7, 0.99)
    with pytest.raises(EvidenceError, match="different beta1"):
        take_first_moment(adam)


def test_the_first_moment_is_moved_where_momentum_is_corrected():
    moved = {name for name, variant in VARIANTS.items() if variant.corrects_momentum}
    assert moved == {"dgc", "halves", "steps", "no-masking", "no-warmup", "no-clipping", "no-feedback", "authors"}
