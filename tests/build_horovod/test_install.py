"""A wheel is installed once."""

import hashlib
import types

import pytest

from dgc.build_horovod import install


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
