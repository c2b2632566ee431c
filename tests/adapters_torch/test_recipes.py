"""The examples under torchrun: each trains, and what reaches DDP's hook from other libraries equals dense training."""

import re
from pathlib import Path

import pytest
from documented import shown
from launch_tools import REPOSITORY, run_mpi
from rank_jobs import TORCHRUN, each_case, once

test_recipe = each_case(Path(__file__).parent / "workers" / "recipes_cases.py", TORCHRUN)

SCRIPTS: dict[str, tuple[int, ...]] = {"torchrun": (2, 10), "fsdp": (4, 15)}
"""Ranks and epochs."""
OTHERS = ("ddp", "accelerate", "trainer", "lightning", "fabric")
"""Short ones, on two ranks; their training loops are cases of the worker, too."""


def test_the_examples_hold_the_lines_of_pytorch_md():
    blocks = shown("pytorch.md", "Accelerate, Trainer, Lightning, Fabric")
    for name, block in zip(("accelerate", "trainer", "lightning", "fabric"), blocks, strict=True):
        code = (REPOSITORY / "examples" / f"{name}_digits.py").read_text()
        lines = list(filter(None, block.splitlines()))
        assert len(lines) <= 3
        assert {line for line in lines if line not in code} == set(), name


@pytest.mark.mpi
@pytest.mark.parametrize("name", once([*SCRIPTS, *OTHERS]))
def test_the_script_trains(name):
    ranks, *epochs = SCRIPTS.get(name, (2,))
    script = REPOSITORY / "examples" / f"{name}_digits.py"
    output = run_mpi(ranks, script, *epochs, launcher="torchrun").stdout
    accuracy, ratio = map(float, re.search(r"accuracy ([\d.]+) %, (\d+) times", output).groups())
    assert accuracy > 85
    assert ratio > {"fsdp": 50, "trainer": 30}.get(name, 100)  # before AdamW more entries are sent
    assert name not in OTHERS or len(script.read_text().splitlines()) < 60
