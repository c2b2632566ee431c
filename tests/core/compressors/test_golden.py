"""The bytes of each compressor, as they were when the format was fixed."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "golden" / "regenerate_compressors.py"
spec = importlib.util.spec_from_file_location("regenerate_compressors", PATH)
golden = importlib.util.module_from_spec(spec)
spec.loader.exec_module(golden)


@pytest.mark.parametrize("case", golden.CASES, ids=str)
def test_bytes_have_not_changed(case):
    wanted = bytes.fromhex((golden.FOLDER / f"{case}.hex").read_text().replace("\n", ""))
    assert golden.message(case) == wanted


def test_every_compressor_has_a_golden_message():
    from documented import own_names

    assert {case.name for case in golden.CASES} == set(own_names()) - {"dgc"}  # dgc's are in golden/wire
