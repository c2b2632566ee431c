"""Content that ranks send to each other between steps carries no code."""

import io
import pickle
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

from dgc.errors import ConfigError
from dgc.torch import packing
from dgc.torch.packing import gather_packed, packed, unpacked
from dgc.transport.local import run_ranks


def test_tensors_numbers_and_texts_arrive_as_they_are():
    content = {
        0: OrderedDict(step=torch.tensor(3.0), exp_avg=torch.ones(3, dtype=torch.bfloat16)),
        "rest": [(True, 1, 0.5, None, "text", b"bytes"), []],
    }
    assert repr(unpacked(packed(content, "an optimizer"))) == repr(content)


@pytest.mark.parametrize(
    ("value", "name"), [(object(), "object"), (np.float64(1), "float64"), (namedtuple("Pair", "a")(1), "Pair")]
)
def test_an_object_is_refused_where_it_is_sent(value, name):
    with pytest.raises(ConfigError, match=f"the state of Lion holds a {name}, which is not sent to other ranks"):
        packed({"state": [{"more": value}]}, "the state of Lion")


class Malicious:
    ran = False

    def __reduce__(self):
        return setattr, (Malicious, "ran", True)


def test_code_that_another_rank_sends_is_not_run():
    buffer = io.BytesIO()
    torch.save({"state": Malicious()}, buffer)
    with pytest.raises(pickle.UnpicklingError):
        unpacked(buffer.getvalue())
    assert not Malicious.ran


@pytest.mark.parametrize("root", [0, 2])
def test_one_rank_gathers_the_bytes_of_all_whatever_their_lengths(root, monkeypatch):
    monkeypatch.setattr(packing, "_CHUNK", 4)
    contents = [np.arange(n, dtype=np.uint8) for n in (0, 4, 11)]
    found = run_ranks(3, lambda transport: gather_packed(transport, contents[transport.rank], root))
    assert [len(each) for each in found] == [3 if rank == root else 0 for rank in range(3)]
    for gathered, content in zip(found[root], contents, strict=True):
        np.testing.assert_array_equal(gathered, content)
