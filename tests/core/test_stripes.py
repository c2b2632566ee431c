"""Stripes: every position has one owner, and an owner's places are its positions in their order."""

import numpy as np
import pytest

from dgc.core.compressors import make_config
from dgc.core.layout import Parameter, make_layout
from dgc.core.stripes import STRIPE, Stripes, owners_of

SHAPES = {"a": (300, 70), "b": (64, 64), "c": (40, 41)}
(BUCKET,) = make_layout([Parameter(n, s, "float32") for n, s in SHAPES.items()], make_config({})).buckets
RANKS = pytest.mark.parametrize("ranks", [2, 3, 7, 16, 64, 1000])


@RANKS
def test_the_owners_places_number_their_positions_in_order(ranks):
    positions = np.arange(BUCKET.sparse_size)
    owners = owners_of(positions, ranks)
    for rank in range(ranks):
        stripes, mine = Stripes(BUCKET, rank, ranks), positions[owners == rank]
        places = stripes.places(mine)
        assert (np.diff(places) > 0).all()
        assert not mine.size or 0 <= places[0] <= places[-1] < stripes.sparse_size
        np.testing.assert_array_equal(stripes.positions(places), mine)


@RANKS
def test_a_tensors_places_are_those_of_its_positions(ranks):
    positions = np.arange(BUCKET.sparse_size)
    owners = owners_of(positions, ranks)
    for rank in range(ranks):
        stripes = Stripes(BUCKET, rank, ranks)
        for segment, places in stripes.slices.items():
            inside = positions[segment.slice][owners[segment.slice] == rank]
            np.testing.assert_array_equal(stripes.places(inside), np.arange(places.start, places.stop))


@RANKS
def test_all_owners_have_equally_many_places(ranks):
    sizes = {Stripes(BUCKET, rank, ranks).sparse_size for rank in range(ranks)}
    assert len(sizes) == 1
    assert sizes.pop() * ranks < BUCKET.sparse_size + STRIPE * ranks


@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_large_columns_of_a_matrix_belong_to_all_owners(ranks):
    """A row is a multiple of a round long: without a rotation, one owner would have all of them."""
    rows, width = 4096, 32 * ranks
    columns = (np.arange(rows)[:, None] * width + np.arange(STRIPE)).reshape(-1)
    counts = np.bincount(owners_of(columns, ranks), minlength=ranks)
    assert counts.max() < 1.5 * counts.mean()
