"""Write dgc/adapter/signatures.py, the constructors of ``Compression``, from the options of the compressors.

    python tools/write_signatures.py            writes the file
    python tools/write_signatures.py --check    fails if the file is out of date

Names, types and defaults are those of the fields of ``DGCConfig``, of each compressor's ``Options`` and of
``AdapterOptions``; the sentences are the comments above these fields and the docstrings of the compressors.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from dgc.adapter.options import AdapterOptions
from dgc.core.codecs import INDEX_CODECS, VALUE_CODECS
from dgc.core.compressors import compressor_class, compressor_names, make_config
from dgc.core.compressors.base import COMMON, FEEDBACK
from dgc.core.config import DGCConfig

FILE = Path(__file__).parent.parent / "dgc/adapter/signatures.py"

# Users may give more than what the config keeps.
ACCEPTED = {
    "sparsity": "float | Sequence[float] | None",
    "include": "str | Sequence[str]",
    "exclude": "str | Sequence[str]",
    "indices": "IndexCodec",
    "values": "ValueCodec | None",
    "small": "ValueCodec",
    "op": "Any",
}

# For control experiments alone.
HIDDEN: set[str] = set()

HEAD = f'''"""The constructors of ``Compression``, for readers, editors and type checkers.

Written by tools/write_signatures.py: change the options in dgc/core and dgc/adapter/options.py instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict

from dgc.adapter.options import Compressor, Optimizer, Tensors, by_name

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dgc.adapter.job import ProcessSet
    from dgc.core.collectives import Transport

IndexCodec = Literal[{", ".join(f'"{name}"' for name in INDEX_CODECS)}]
ValueCodec = Literal[{", ".join(f'"{name}"' for name in VALUE_CODECS)}]
'''

TENSORS = [
    "parameters: the tensors to compress, for Horovod's own wrappers: ``model.named_parameters()`` in PyTorch, "
    "``model.trainable_variables`` of a built model in TensorFlow.",
    "optimizer: whose tensors are compressed, and whose momentum is taken over.",
]

RAISES = """Raises:
    TypeError: an unknown option; the message lists the valid ones.
    ConfigError: an option out of range, momentum applied twice, or Horovod not initialised.
    LayoutError: ranks disagree about the tensors."""


@dataclasses.dataclass
class Option:
    """One option of a constructor; ``sentence`` explains it."""

    name: str
    type: str
    default: Any
    sentence: str


def options_of(cls: type) -> dict[str, Option]:
    """The fields of a dataclass, each with the comment above it."""
    source = inspect.getsource(cls)
    found = {}
    for field in dataclasses.fields(cls):
        above = re.search(rf"((?:^    # .*\n)*)^    {field.name}: ", source, re.MULTILINE)
        sentence = " ".join(line.strip("# ") for line in above[1].splitlines()) if above else ""
        found[field.name] = Option(field.name, ACCEPTED.get(field.name, str(field.type)), field.default, sentence)
    return found


COMMONS, ADAPTERS = options_of(DGCConfig), options_of(AdapterOptions)
SHARED = {
    "CommonOptions": (
        "TypedDict",
        [*COMMON, *ADAPTERS],
        "Options of every compressor; :meth:`Constructors.dgc` explains them.",
    ),
    "FeedbackOptions": ("CommonOptions", FEEDBACK, "Options of compressors that keep what they do not send."),
    "EntryOptions": ("FeedbackOptions", ["momentum_masking"], "Options of compressors that send some entries."),
}


def dictionary(name: str) -> str:
    """The text of one TypedDict."""
    base, names, sentence = SHARED[name]
    fields = [{**COMMONS, **ADAPTERS}[each] for each in names if each not in HIDDEN]
    lines = [f"{option.name}: {option.type}" for option in fields]
    return f'\n\nclass {name}({base}, total=False):\n    """{sentence}"""\n\n' + textwrap.indent(
        "\n".join(lines), "    "
    )


def argument(text: str) -> str:
    """One argument's entry in a docstring."""
    return textwrap.fill(text, 120, initial_indent=" " * 12, subsequent_indent=" " * 16, break_on_hyphens=False)


def shared_by(name: str) -> tuple[str, list[str]]:
    """The TypedDict of the other options of a compressor, and what is in it; nothing for ``dgc``, which lists all."""
    row = compressor_class(name)
    if name == "dgc":
        return "", []
    kind = "EntryOptions" if row.sends_entries else "FeedbackOptions" if row.error_feedback else "CommonOptions"
    bases = list(SHARED)[: list(SHARED).index(kind) + 1]
    return kind, [each for base in bases for each in SHARED[base][1]]


def others(config: DGCConfig, shared: list[str]) -> str:
    """Which shared options have another default than with ``dgc``."""
    values = ((n, getattr(config, n)) for n in shared if n in compressor_class(config.algorithm).defaults())
    return ", ".join(f"``{n}`` is {json.dumps(v) if isinstance(v, str) else repr(v)}" for n, v in values)


def constructor(name: str) -> str:
    """The text of one constructor."""
    row, config = compressor_class(name), make_config({}, algorithm=name)
    kind, shared = shared_by(name)
    own = [
        *options_of(row.Options).values(),
        *(COMMONS[n] for n in row.common_options() if n not in {*shared, *HIDDEN}),
    ]
    shown = own if kind else [*own, *ADAPTERS.values()]
    parameters, told = [], ["parameters: as for :meth:`dgc`.", "optimizer: as for :meth:`dgc`."] if kind else [*TENSORS]
    for option in shown:
        default = getattr(config.own, option.name, getattr(config, option.name, option.default))
        if option.name == "sparsity" and default is not None:  # only dgc chooses it
            (default,), sentence = default, option.sentence.partition(" None:")[0]
            option = dataclasses.replace(option, type=option.type.removesuffix(" | None"), sentence=sentence)
        parameters.append(f"{option.name}: {option.type} = {default!r},")
        told.append(f"{option.name}: {option.sentence}")
    if kind:
        parameters.append(f"**options: Unpack[{kind}],")
        told.append(f"**options: those of :class:`{kind}`, explained at :meth:`dgc`; {others(config, shared)}.")
    *texts, source = inspect.cleandoc(row.__doc__ or "").split("\n\n")
    sections = [textwrap.indent(text, " " * 8) for text in texts]
    sections.append("        Args:\n" + "\n".join(argument(each) for each in told))
    sections += [] if kind else [textwrap.indent(RAISES, " " * 8)]
    sections.append(textwrap.indent(source, " " * 8))
    return f'''
    @by_name
    def {name}(
        self,
        parameters: Tensors | None = None,
        optimizer: Optimizer | None = None,
        *,
        {" ".join(parameters)}
    ) -> Compressor:
        """{(chr(10) * 2).join(sections).lstrip()}
        """
        raise NotImplementedError
'''


def text() -> str:
    """The whole file."""
    constructors = "".join(constructor(n) for n in compressor_names() if compressor_class(n).number < 128)
    dictionaries = "\n".join(map(dictionary, SHARED))
    written = f'''{HEAD}{dictionaries}


class Constructors(Generic[Tensors, Optimizer, Compressor]):
    """A constructor for each compressor of this package.

    Each returns a compressor to give to a wrapper as ``compression=``, which binds it to the model. For the wrappers of
    Horovod itself, pass the tensors and the optimizer here (on all ranks together). All raise what :meth:`dgc` does.
    """
{constructors}'''
    formatted = subprocess.run(["ruff", "format", "-"], input=written, capture_output=True, text=True, check=True)
    return formatted.stdout


if __name__ == "__main__":
    if "--check" not in sys.argv:
        FILE.write_text(text())
    elif FILE.read_text() != text():
        sys.exit(f"{FILE} is out of date: run python tools/write_signatures.py")
