"""``Compression.<name>`` of every registered compressor, the same in all frameworks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from dgc.core.compressors.registry import compressor_class, compressor_names
from dgc.core.config.composite import WRAPPERS
from dgc.errors import ConfigError


def constructor(name: str, owner: object, make: Callable[..., Any]) -> Callable[..., Any]:
    """What ``Compression.<name>`` is: ``make`` with the compressor's name as its first argument, and a help text.

    Args:
        name: the attribute that was asked for.
        owner: whose attribute, for the error.
        make: builds a framework's compressor from an algorithm's name, what it is bound to, and options.

    Raises:
        AttributeError: there is no such compressor; the message lists those there are.
    """
    if name in WRAPPERS:
        return _wrapper(name, make)
    try:
        row = compressor_class(name)
    except ConfigError:
        known = ", ".join(("none", "fp16", *compressor_names(), *WRAPPERS))
        raise AttributeError(f"Compression has no {name!r}; it has {known}", name=name, obj=owner) from None

    @functools.wraps(make)
    def build(*args: Any, **options: Any) -> Any:
        return make(name, *args, **options)

    own = "\n".join(f"    {f.name}={f.default!r}" for f in dataclasses.fields(row.Options))
    build.__name__ = build.__qualname__ = name
    build.__doc__ = (
        f"{row.__doc__}\n\nOptions of its own:\n{own or '    none'}\n\nOptions it shares with other compressors:\n"
        f"    {', '.join(row.common_options())}, transport, loss_scale, process_set\n"
    )
    return build


def _wrapper(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
    """``Compression.by_size`` and its like: the members come first."""

    def build(members: Any, *args: Any, **options: Any) -> Any:
        return make(name, *args, members=members, **options)

    build.__name__ = build.__qualname__ = name
    build.__doc__ = _WRAPPER_TEXTS[name]
    return build


_WRAPPER_TEXTS = {
    "by_size": """Choose a compressor by the number of elements of a tensor.

    ``Compression.by_size({0: None, 4096: Compression.onebit(), 1_000_000: Compression.topk()}, ...)``: each key is the
    smallest number of elements that its compressor is for; None stands for no compression.

    Options that concern all tensors (momentum, clipping, warm-up, transport, ...) belong to this wrapper, the others to
    its members.
    """,
    "by_name": """Choose a compressor by the name of a tensor.

    ``Compression.by_name({"*embedding*": Compression.topk(), "*": Compression.qsgd()}, ...)``: the first pattern that
    fits (as in ``fnmatch``) counts; a tensor that none fits travels dense.

    Options that concern all tensors (momentum, clipping, warm-up, transport, ...) belong to this wrapper, the others to
    its members.
    """,
    "by_step": """Choose a compressor by the step.

    ``Compression.by_step({0: None, 500: Compression.qsgd(), 2000: Compression.topk()}, ...)``: each from its step on;
    None, at 0 only, is a dense warm-up. What one has not sent is the next one's residual.

    Options that concern all steps (momentum, clipping, transport, ...) belong to this wrapper, the others to its
    members.
    """,
}
