"""The files of a checkpoint, of one process."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

import dgc.torch as dgc
from dgc.errors import LayoutError, TransportError


def job(value=0.0):
    model = torch.nn.Linear(300, 300)
    torch.nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "compression": dgc.Compression.dgc()}


def test_the_reason_of_a_file_that_torch_cannot_write_is_told(tmp_path, monkeypatch):
    """torch says "unexpected pos" where a disk is full, and nothing of a file."""
    real = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda self, *a, **k: real(Path("/dev/full") if self.name.startswith("checkpoint.pt.") else self, *a, **k),
    )
    with pytest.raises(TransportError, match=r"checkpoint\.pt could not be written: No space left on device"):
        dgc.save_checkpoint(tmp_path, **job())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "name"), [(np.float32(1), r"numpy\.\w+\.multiarray\.scalar"), (Namespace(lr=1), r"argparse\.Namespace")]
)
def test_a_refused_object_is_named_without_advice_to_trust_it(tmp_path, content, name):
    torch.save({"args": content}, tmp_path / "checkpoint.pt")
    with pytest.raises(
        LayoutError, match=f"checkpoint.pt cannot be loaded: it was not written by .*it holds .*{name}"
    ) as of:
        dgc.load_checkpoint(tmp_path, **job())
    with pytest.raises(
        TypeError, match=rf"extra= holds .*convert it \(float\(x\), vars\(args\)\): it holds .*{name}"
    ) as to:
        dgc.save_checkpoint(tmp_path, **job(), extra={"args": content})
    for error in (of, to):
        assert "trust" not in str(error.value)
        assert "weights_only" not in str(error.value)


def test_a_checkpoint_is_whole_where_the_user_has_turned_off_torchs_checksums(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        dgc.save_checkpoint(tmp_path, **job(5.0))
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(before)
    loaded = job()
    dgc.load_checkpoint(tmp_path, **loaded)
    assert loaded["model"].weight.eq(5.0).all()
