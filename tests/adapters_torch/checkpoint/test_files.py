"""How the files of a checkpoint are written and read."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from dgc.errors import LayoutError, TransportError
from dgc.torch.checkpoint import files, save


def test_the_reason_of_a_file_that_torch_cannot_write_is_told(tmp_path, monkeypatch):
    """torch says "unexpected pos" where a disk is full, and nothing of a file."""
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a: real(Path("/dev/full") if "partial" in self.name else self, *a))
    written = files.Written("f" * 16)
    with pytest.raises(TransportError, match=r"checkpoint\.pt could not be written: No space left on device"):
        written.add(tmp_path / files.MAIN_FILE, {"a": torch.zeros(100_000)})
    written.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "name"), [(np.float32(1), r"numpy\.\w+\.multiarray\.scalar"), (Namespace(lr=1), r"argparse\.Namespace")]
)
def test_a_refused_object_is_named_without_advice_to_trust_it(tmp_path, content, name):
    torch.save({"args": content}, tmp_path / "foreign.pt")
    with pytest.raises(
        LayoutError, match=f"foreign.pt cannot be loaded: it was not written by .*it holds .*{name}"
    ) as of:
        files.read(tmp_path / "foreign.pt", "")
    with pytest.raises(
        TypeError, match=rf"extra= holds .*convert it \(float\(x\), vars\(args\)\): it holds .*{name}"
    ) as to:
        save._require_loadable({"args": content})
    for error in (of, to):
        assert "trust" not in str(error.value)
        assert "weights_only" not in str(error.value)


def test_checksums_are_those_of_the_files_whatever_the_user_has_chosen_for_torch(tmp_path):
    before = torch.serialization.get_crc32_options()
    written = files.Written("f" * 16)
    torch.serialization.set_crc32_options(False)
    try:
        written.add(tmp_path / files.MAIN_FILE, {"a": torch.arange(100)})
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(before)
        written.release()
    assert torch.equal(files.read(tmp_path / files.MAIN_FILE, "")["a"], torch.arange(100))
