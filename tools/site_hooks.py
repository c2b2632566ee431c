"""Hooks of ``mkdocs.yml``: the start page, old addresses, and the names in docstrings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>(~?)([^<]+)</code>")

MOVED = {
    "adamw": "pytorch#classic",
    "adamw#how-far-behind-dense": "results#how-far-behind-dense",
    "adamw#figures": "results#adamw-with-classic-error-feedback",
    "adamw#clipping": "pytorch#clipping",
    "adamw#hugging-faces-trainer": "pytorch#accelerate-trainer-lightning-fabric",
    "chaos": "pytorch#checkpoints",
    "checkpoints": "pytorch#checkpoints",
    "checkpoints#accelerate-hugging-faces-trainer-lightning-fabric": "pytorch#accelerate-trainer-lightning-fabric",
    "choosing": "options#how-to-choose",
    "choosing#by-length": "options#what-steps-chooses",
    "choosing#by-model": "results#sgd",
    "choosing#by-optimizer": "options#by-optimizer",
    "coming-from": "elsewhere",
    "coming-from#with-adamw": "results#beside-other-methods",
    "compressors": "options#other-compressors",
    "compressors#small-tensors": "options#small-tensors",
    "ddp": "pytorch#two-front-ends",
    "ddp#accelerate-trainer-lightning-fabric": "pytorch#accelerate-trainer-lightning-fabric",
    "ddp#what-changes": "pytorch#between-backward-and-step",
    "evidence": "results#sgd",
    "faq": "start",
    "faq#why-is-my-training-not-faster": "options#why-is-my-training-not-faster",
    "faq#why-is-grad-none-after-step": "pytorch#classic",
    "faq#what-is-in-grad-after-backward": "pytorch#between-backward-and-step",
    "faq#how-do-i-use-mixed-precision": "pytorch#mixed-precision",
    "faq#how-do-i-accumulate-gradients": "pytorch#accumulation-unused-and-sparse-gradients",
    "faq#how-does-it-scale-with-the-number-of-ranks": "options#many-ranks",
    "faq#how-much-memory-does-it-take": "pytorch#accumulation-unused-and-sparse-gradients",
    "faq#what-does-a-checkpoint-have-to-contain": "pytorch#checkpoints",
    "faq#how-do-i-run-the-dense-baseline": "start#a-first-comparison",
    "from-bagua": "elsewhere#baguas-fused-optimizer",
    "from-paddle": "elsewhere#paddles-dgcmomentumoptimizer",
    "fsdp": "pytorch#fsdp2-between-nodes",
    "get-started": "start#install",
    "get-started#is-it-worth-it-here": "start#is-it-worth-it-here",
    "get-started#pytorch-with-torchrun": "start#pytorch-with-torchrun",
    "get-started#what-changes-in-training": "pytorch#between-backward-and-step",
    "get-started#limits": "pytorch#from-horovod",
    "glossary": "start#how-it-works",
    "gpu": "pytorch#gpus",
    "how-it-works": "start#how-it-works",
    "how-it-works#many-ranks-owners-add-up": "architecture#many-ranks-owners-add-up",
    "inside": "pytorch#watch-a-run",
    "inside#when-accuracy-drops": "options#when-accuracy-drops",
    "join-elastic": "pytorch#uneven-data",
    "join-elastic#elastic-jobs-dgctorchelastic": "pytorch#elastic-jobs",
    "many-ranks": "options#many-ranks",
    "many-ranks#measured-on-16-hosts": "results#many-ranks",
    "nodes": "options#several-ranks-on-a-node",
    "performance": "results#time",
    "step-ahead": "pytorch#step-ahead",
    "step-ahead#how-far-behind-dense": "results#adamw-step-ahead",
    "steps": "pytorch#between-backward-and-step",
    "troubleshooting": "options#errors",
    "tuning": "options#when-accuracy-drops",
    "tuning#clipping": "pytorch#clipping",
    "tuning#optimizers-under-sparse-gradients": "options#by-optimizer",
    "tuning#the-warm-up-of-the-sparsity": "options#the-warm-up-of-the-sparsity",
    "tutorial": "start#a-first-comparison",
    "tutorial#what-describe-says": "start#how-to-see-that-it-works",
    "tutorial#watch-a-run": "pytorch#watch-a-run",
    "zero": "elsewhere#zeroredundancyoptimizer",
}
"""Addresses of former pages, and where their text is now."""

_FORWARD = """<!doctype html><meta charset="utf-8"><title>Moved</title><link rel="canonical" href="{page}">
<script>location.replace(({sections})[location.hash] || "{page}")</script>
<noscript><meta http-equiv="refresh" content="0; url={page}"></noscript><a href="{page}">This page has moved.</a>
"""


def address(page: str) -> str:
    """The address of ``page#section``, as seen from another page."""
    name, _, section = page.partition("#")
    return f"../{'' if name == 'start' else name + '/'}" + (f"#{section}" if section else "")


def on_files(files: Any, **_: object) -> Any:
    """Let start.md be the site's first page."""
    start = files.get_file_from_path("start.md")
    start.name, start.dest_uri, start.url = "index", "index.html", "./"
    return files


def on_post_build(config: Any, **_: object) -> None:
    """Write a page at each old address that leads to the new one."""
    for old in (old for old in MOVED if "#" not in old):
        sections = {"#" + key.partition("#")[2]: address(to) for key, to in MOVED.items() if key.startswith(f"{old}#")}
        folder = Path(config["site_dir"]) / old
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").write_text(_FORWARD.format(page=address(MOVED[old]), sections=json.dumps(sections)))


def on_page_content(html: str, **_: object) -> str:
    """Turn ``:func:`~package.name``` into ``name`` in code, as Sphinx does."""
    return _ROLE.sub(lambda role: f"<code>{role[2].rpartition('.')[2] if role[1] else role[2]}</code>", html)
