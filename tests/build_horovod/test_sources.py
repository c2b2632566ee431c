"""The edits of Horovod's sources find their lines or say so."""

import pytest

from dgc.build_horovod import sources
from dgc.build_horovod.process import BuildError

EDIT = sources.Edit("CMakeLists.txt", "set(STANDARD 14)", "set(STANDARD 17)", "a test")


def write_sources(root, **replaced):
    """Write files holding the lines that the edits look for; `replaced` exchanges the text of some."""
    for edit in sources.EDITS:
        path = root / edit.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(replaced.get(path.name, around(edit.path, "old")))


def around(path, what):
    """Text of a file with all lines that are edited in it, ``old`` or ``new``."""
    lines = [f"    {getattr(edit, what)}\n" for edit in sources.EDITS if edit.path == path]
    return "".join(["first\n", *lines, "last\n"])


def test_substitute_replaces_one_line_and_keeps_the_rest():
    text = "a\n  set(STANDARD 14)\r\nset(STANDARD 14) # not the same line\nb"
    assert sources.substitute(text, EDIT) == "a\n  set(STANDARD 17)\r\nset(STANDARD 14) # not the same line\nb"


@pytest.mark.parametrize(("text", "times"), [("", 0), ("set(STANDARD 17)\n", 0), ("set(STANDARD 14)\n" * 2, 2)])
def test_substitute_refuses_other_sources(text, times):
    with pytest.raises(BuildError, match=rf"CMakeLists\.txt: expected .* found it {times} times"):
        sources.substitute(text, EDIT)


def test_apply_edits_changes_every_file(tmp_path):
    write_sources(tmp_path)
    sources.apply_edits(tmp_path)
    for edit in sources.EDITS:
        assert (tmp_path / edit.path).read_text() == around(edit.path, "new")


def test_two_edits_of_one_file_both_hold(tmp_path):
    (tmp_path / "CMakeLists.txt").write_text("set(STANDARD 14)\nset(OTHER 1)\n")
    other = sources.Edit("CMakeLists.txt", "set(OTHER 1)", "set(OTHER 2)", "a test")
    sources.apply_edits(tmp_path, (EDIT, other))
    assert (tmp_path / "CMakeLists.txt").read_text() == "set(STANDARD 17)\nset(OTHER 2)\n"


def test_apply_edits_is_all_or_nothing(tmp_path):
    write_sources(tmp_path, **{"xla_mpi_ops.cc": "another version\n"})
    before = (tmp_path / "CMakeLists.txt").read_text()
    with pytest.raises(BuildError, match="xla_mpi_ops"):
        sources.apply_edits(tmp_path)
    assert (tmp_path / "CMakeLists.txt").read_text() == before


def test_a_missing_file_is_named(tmp_path):
    write_sources(tmp_path)
    (tmp_path / "horovod/torch/CMakeLists.txt").unlink()
    with pytest.raises(BuildError, match=r"horovod/torch/CMakeLists\.txt is missing"):
        sources.apply_edits(tmp_path)


def test_wrong_sources_are_refused(tmp_path):
    sdist = tmp_path / "horovod-0.28.1.tar.gz"
    sdist.write_bytes(b"something else")
    with pytest.raises(BuildError, match="SHA-256"):
        sources.fetch_sources(tmp_path, sdist, tmp_path / "log")
