"""A wheel is installed once."""

import hashlib
import types
import zipfile
from contextlib import nullcontext

import pytest
from build_tools import make_toolchain

from dgc.build_horovod import install
from dgc.build_horovod.process import BuildError


@pytest.mark.parametrize(
    ("record", "same"),
    [
        ('{"archive_info": {"hashes": {"sha256": "%s"}}}' % hashlib.sha256(b"a wheel").hexdigest(), True),  # noqa: UP031
        ('{"archive_info": {"hashes": {"sha256": "00"}}}', False),
        ('{"dir_info": {}}', False),
        (None, False),
    ],
)
def test_an_installed_wheel_is_recognised(tmp_path, monkeypatch, record, same):
    wheel = tmp_path / "horovod.whl"
    wheel.write_bytes(b"a wheel")
    monkeypatch.setattr(
        install.importlib.metadata, "distribution", lambda name: types.SimpleNamespace(read_text=lambda file: record)
    )
    assert install.is_installed(wheel) is same


@pytest.mark.parametrize("works", [True, False])
def test_a_wheel_is_tried_without_being_installed(tmp_path, works):
    wheel = tmp_path / "horovod.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("horovod/__init__.py", "")
        archive.writestr(
            "horovod/torch.py", "init = bool\nsize = lambda: 1" if works else "raise ImportError('libc++')"
        )
    with nullcontext() if works else pytest.raises(BuildError, match=r"(?s)horovod.torch does not start:.*libc\+\+"):
        install.require_loading(wheel, make_toolchain())
