"""A hook of ``mkdocs.yml``: docstrings name other objects by Sphinx's roles, of which a reader sees the name alone."""

from __future__ import annotations

import re

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>(~?)([^<]+)</code>")


def on_page_content(html: str, **_: object) -> str:
    """Turn ``:func:`~package.name``` into ``name`` in code, as Sphinx does."""
    return _ROLE.sub(lambda role: f"<code>{role[2].rpartition('.')[2] if role[1] else role[2]}</code>", html)
