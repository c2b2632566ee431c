"""The pages: links lead somewhere, code is Python, and what they quote and list is there."""

import ast
import importlib.util
import re
import textwrap
from pathlib import Path

import pytest

from dgc.core.compressors import make_config

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OTHERS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/evidence.md")
OTHERS += ("benchmarks/results/README.md", "benchmarks/chaos/README.md")
FILES = [*(REPOSITORY / name for name in OTHERS if (REPOSITORY / name).exists()), *PAGES]  # an sdist has no results


def test_the_site_shows_every_page():
    listed = set(re.findall(r": ([\w/-]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {page.relative_to(DOCS).as_posix() for page in PAGES}


def anchors(page):
    """Of the headings of a page, as the site and the repository's host make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        page = path.parent / name if name else path
        assert page.is_file(), target
        assert path not in PAGES or page.resolve().is_relative_to(DOCS), f"{target} is not on the site"
        assert not anchor or anchor in anchors(page), target


def test_old_addresses_lead_to_pages_that_exist():
    specification = importlib.util.spec_from_file_location("site_hooks", REPOSITORY / "tools" / "site_hooks.py")
    hooks = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(hooks)
    assert len(hooks.MOVED) >= 27
    for old, new in hooks.MOVED.items():
        name, _, anchor = new.partition("#")
        page = DOCS / f"{name}.md"
        assert page.is_file(), new
        assert not anchor or anchor in anchors(page), new
        assert old.partition("#")[0] in hooks.MOVED, f"{old} has no page"
        assert not (DOCS / f"{old.partition('#')[0]}.md").exists(), f"{old} is still a page"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_python_blocks_are_python(path):
    for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\.\.\.\n", block, flags=re.MULTILINE):
            ast.parse(textwrap.dedent(part))


def test_the_page_says_what_steps_chooses():
    """The table of lengths, and the share with step-ahead error feedback."""
    page = (DOCS / "options.md").read_text()
    rows = re.findall(r"^\| ([\d,]+)(?: and (?:fewer|more))? \| ([\d.]+) %.*? \| ([\d.]+) %", page, re.MULTILINE)
    assert len(rows) == 5
    for length, *shares in rows:
        for adaptive, share in enumerate(shares):
            options = {"steps": int(length.replace(",", "")), "error_feedback": "classic"}
            config = make_config(options).suited(bool(adaptive))
            assert 100 * (1 - config.sparsity[-1]) == pytest.approx(float(share), rel=0.03), length
            ahead = make_config({**options, "error_feedback": "step-ahead"}).suited(True)
            first, later = (f"{100 * (1 - sparsity):.0f} %" for sparsity in ahead.on_ranks(2).sparsities)
            said = f"an adaptive optimizer sends {first} in the first fifth of the steps and {later} later"
            assert f"With step-ahead error feedback {said}" in " ".join(page.split())
            chosen = [ahead.on_ranks(ranks).sparsities for ranks in (4, 8, 16, 17)]
            assert all(len({*each}) == 1 for each in chosen)
            four, eight, sixteen, more = (f"{100 * (1 - each[0]):.2g} %" for each in chosen)
            said = (
                f"on three and four ranks {four}, on five to eight {eight}, on nine to 16 {sixteen}, and on more {more}"
            )
            assert f"{said} in all steps" in " ".join(page.split())
    assert make_config({}).suited(True, steps_ahead=True).rampup_step == 2 * 1000
    assert "Without `steps=` the first 1,000 steps count as the first fifth" in " ".join(page.split())


def test_the_errors_are_messages_that_exist():
    nodes = [node for path in (REPOSITORY / "dgc").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    page = (DOCS / "options.md").read_text().split("\n## Errors\n")[1]
    quoted = re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)
    assert len(quoted) >= 30
    assert [message for message in quoted if not any(message in text for text in texts)] == []


def public(module):
    """The names that a package lists in its ``__all__``."""
    text = (REPOSITORY / module.replace(".", "/") / "__init__.py").read_text()
    (listed,) = re.findall(r"^__all__ = (\[.*?\])", text, re.DOTALL | re.MULTILINE)
    return {f"{module}.{name}" for name in ast.literal_eval(listed)}


def test_the_reference_has_every_public_name():
    pages = "".join((DOCS / "api" / name).read_text() for name in ("torch.md", "tensorflow.md"))
    shown = set(re.findall(r"^::: (.+)$", pages, re.MULTILINE))
    modules = {"dgc.errors", "dgc.contrib.paddle"}
    expected = public("dgc.torch") | public("dgc.tensorflow") | modules
    same = {"Compression", "DGCCompressor", "DGCMomentum", "join"}  # of both packages for TensorFlow
    expected |= {name for name in public("dgc.tensorflow.keras") if name.rpartition(".")[2] not in same}
    second_name = {name for name in expected if name.endswith(".DGCMomentumOptimizer")}  # of DGCMomentum
    assert shown == expected - second_name
