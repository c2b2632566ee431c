"""The host's tables are the structs of the CUDA sources, field by field."""

import re

import pytest

from dgc.core.kernels.gpu import tables
from dgc.core.kernels.gpu.cuda import source


@pytest.mark.parametrize("table", ["SEGMENT", "FOUND", "SUMMARY", "TENSOR", "TARGET", "RUN"])
def test_tables_have_the_fields_of_the_structs(table):
    """Same names, order and offsets on both sides (sizes are asserted by the sources themselves)."""
    struct = re.search(rf"struct {table.capitalize()} {{(.*?)}};", source.source(), re.S).group(1)
    sizes = {"u64": 8, "i64": 8, "double": 8, "int": 4}
    fields = []
    for line in re.sub(r"//[^\n]*", "", struct).split(";"):
        words = line.replace("const ", "").split(None, 1)
        if len(words) == 2:
            size = 8 if words[0].endswith("*") else sizes[words[0]]
            fields += [(name.strip(), size) for name in words[1].split(",")]
    dtype = getattr(tables, table)
    assert [(name, dtype[name].itemsize) for name in dtype.names] == fields
