"""Runs under horovodrun: killed and called again, without what they need, and what is said then."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from launch_tools import require, run_mpi

from evidence import launch
from evidence.__main__ import main
from evidence.application import EvidenceError
from evidence.applications import application_class
from evidence.launch import UNFINISHED, Launcher, RunFailedError, available
from evidence.plan import Run
from evidence.trainers.base import Record

KILLED = Path(__file__).parent / "workers" / "killed.py"
RUN = Run("language", "dgc", 0)


def without_times(curve: Record) -> Record:
    return [{key: value for key, value in epoch.items() if "seconds" not in key} for epoch in curve]


@pytest.mark.mpi
def test_a_run_that_was_killed_goes_on_to_the_curve_of_one_that_was_not(tmp_path):
    require("horovodrun")
    application_class("language").prepare("tiny")
    whole = Launcher(tmp_path / "whole", "tiny", 2).train(RUN)
    folder, result = tmp_path / "broken" / UNFINISHED / RUN.id, tmp_path / "broken" / f"{RUN.id}.json"
    places = ("--scale", "tiny", "--folder", folder, "--result", result)
    ended = run_mpi(2, KILLED, *("language", "dgc", "0"), *places, check=False)
    assert ended.returncode != 0
    assert not result.exists()
    assert json.loads((folder / "progress.json").read_text())["epoch"] == 2
    out = io.StringIO()
    launcher = Launcher(tmp_path / "broken", "tiny", 2, out)
    assert launcher.run_all([RUN]) == {}
    found = launcher.result(RUN)
    assert without_times(found["curve"]) == without_times(whole["curve"])
    assert found["digest"] == whole["digest"]
    assert not folder.exists()
    assert "[1/1] language-dgc-0: perplexity" in out.getvalue()
    # What has its result is not trained again.
    launcher.train = None
    assert launcher.run_all([RUN]) == {}


def test_ranks_end_with_a_launcher_that_was_killed():
    launcher = subprocess.Popen(["sleep", "600"])
    watch = f"from evidence.guard import end_with; end_with({launcher.pid})"
    code = f"import time; {watch}; print('on', flush=True); time.sleep(600)"
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=launch.REPOSITORY)
    assert rank.stdout is not None
    with rank.stdout:
        assert rank.stdout.readline() == b"on\n"
        assert rank.poll() is None
        launcher.kill()
        launcher.wait()
        assert rank.wait(300) == 1


def fake(tmp_path, monkeypatch, script: str) -> Launcher:
    """A launcher whose horovodrun is another program."""
    program = tmp_path / "horovodrun"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(launch.shutil, "which", lambda name, path: str(program))
    return Launcher(tmp_path / "results", "tiny", 2, io.StringIO())


def test_a_run_that_fails_says_why_and_the_others_go_on(tmp_path, monkeypatch):
    launcher = fake(tmp_path, monkeypatch, "echo '[1,0]<stderr>:error: the disk is full' >&2; exit 3")
    other = Run("language", "dense", 0)
    failed = launcher.run_all([RUN, other])
    assert list(failed) == [RUN, other]
    assert failed[RUN].startswith("the disk is full (all it wrote: ")
    with pytest.raises(RunFailedError, match="disk is full"):
        launcher.train(RUN)


def test_a_result_of_another_plan_is_refused_and_stays(tmp_path):
    (tmp_path / f"{RUN.id}.json").write_text(json.dumps({"scale": "tiny", "ranks": 4}))
    with pytest.raises(EvidenceError, match="has ranks 4, this plan 2"):
        Launcher(tmp_path, "tiny", 2).result(RUN)
    (tmp_path / f"{RUN.id}.json").write_text("{")
    with pytest.raises(EvidenceError, match="damaged"):
        Launcher(tmp_path, "tiny", 2).result(RUN)


def test_two_calls_do_not_meet_in_one_folder(tmp_path, monkeypatch):
    launcher = fake(tmp_path, monkeypatch, "exit 1")
    with launcher._alone(), pytest.raises(EvidenceError, match="another call is at work"):
        launcher.run_all([RUN])


def test_what_is_missing_is_said_and_the_rest_is_trained(tmp_path, monkeypatch, capsys):
    class Lacking:
        ranks = 2

        @classmethod
        def missing(cls):
            return "espeak is missing: install it"

    monkeypatch.setattr(launch, "application_class", lambda name: Lacking)
    assert available(["speech"], "tiny") == {"speech": "espeak is missing: install it"}
    assert main(["--only", "speech", "--results", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "speech is left out: espeak is missing" in said.out
    assert "there is nothing to train" in said.err


def test_a_call_on_one_rank_or_for_what_there_is_not_says_so(capsys):
    for line, words in (
        (["--ranks", "1"], "at least 2"),
        (["--only", "chess"], "there is no application 'chess'"),
        (["--variants", "dense,chess"], "there is no variant 'chess'"),
    ):
        with pytest.raises(SystemExit):
            main(line)
        assert words in capsys.readouterr().err
