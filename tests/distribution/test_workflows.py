"""What the workflows must not lose: checks before a release, and actions that nobody can exchange."""

import re
from pathlib import Path

import pytest
import tomllib
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))


def jobs(path):
    return yaml.safe_load(path.read_text())["jobs"]


def test_nothing_is_published_before_lint_and_tests_have_passed():
    folder = WORKFLOWS[0].parent
    release = jobs(folder / "release.yml")
    assert {"checks", "build"} <= set(release["publish"]["needs"])
    checks = folder / Path(release["checks"]["uses"]).name
    lines = [step.get("run", "") for job in jobs(checks).values() for step in job["steps"]]
    assert {"make lint", "make test"} <= set(lines)


def test_the_oldest_versions_that_are_claimed_are_tested():
    """The lower bounds of pyproject.toml, and its oldest and newest Python."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    oldest = jobs(WORKFLOWS[0].parent / "nightly.yml")["oldest"]["steps"]
    (install,) = [step["run"] for step in oldest if "pip install" in step.get("run", "")]
    bounds = [*project["dependencies"], *project["optional-dependencies"]["torch"]]
    for name, least in (bound.split(">=") for bound in bounds if bound.startswith(("torch", "numpy", "numba"))):
        assert f'"{name}=={least}.*"' in install
    pythons = [text.rpartition(" ")[2] for text in project["classifiers"] if " :: 3." in text]
    tested = jobs(WORKFLOWS[0].parent / "checks.yml")["without-horovod"]["strategy"]["matrix"]["python"]
    assert tested == [pythons[0], pythons[-1]]
    assert oldest[1]["with"]["python-version"] == pythons[0] == project["requires-python"].removeprefix(">=")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_by_the_digest_of_a_commit(path):
    used = [each["uses"] for job in jobs(path).values() for each in (job, *job.get("steps", ())) if "uses" in each]
    foreign = [name for name in used if not name.startswith("./")]
    assert foreign
    assert [name for name in foreign if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name)] == []
