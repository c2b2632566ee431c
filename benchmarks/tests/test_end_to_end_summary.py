"""What benchmarks/end_to_end.py makes of its ranks' figures; the measurement itself needs a network and minutes."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # last: names there may be those of tests

from training.summary import HEAD, PARTS, summarise, table


def of_a_rank(seconds: list[list[float]], sent: float, **more) -> dict:
    """Steps by block, each with all its seconds in the backward pass."""
    steps = [{**dict.fromkeys(PARTS, 0.0), "backward": s, **more} for block in seconds for s in block]
    kernel = {"page_faults": 1, "switches_voluntary": 2, "switches_involuntary": 3}
    counted = {"bytes": {"eth0_sent": sent}, "cpu": {"main": 0.5, "horovod": 0.25}, "kernel": kernel}
    counted["memory"] = {"peak": 123_456_789}
    return {"steps": steps, "blocks": [{"seconds": sorted(b)[len(b) // 2], **counted} for b in seconds]}


def test_ratios_are_those_of_pairs_and_hidden_is_what_was_not_waited_for():
    phases = {"compress": 0.3, "exchange": 0.2, "apply": 0.1, "wait": 0.4}
    said = {"phases": phases, "density": 0.001, "handed_over": 90}
    ranks = [
        {
            "none": of_a_rank([[1, 1, 9], [2, 2, 2]], 0),
            "dgc-b": of_a_rank([[2, 2, 2], [6, 6, 6]], 100, **said),
        }
    ] * 2
    none, dgc = summarise(ranks)
    assert none["ratio_to_none"] == [1, 1, 1]
    assert none["seconds"] == 2
    assert dgc["ratio_to_none"] == [2.5, 2, 3]
    assert "ratio_to_dense" not in dgc
    assert dgc["bytes"] == {"eth0_sent": 100}
    assert dgc["exposed"] == 0.4
    assert dgc["hidden"] == pytest.approx(0.2)

    where = {"model": "mlp", "ranks": 2, "rate": "1gbit", "parameters": 10}
    lines = table([{**where, **row} for row in (none, dgc)]).splitlines()
    assert lines[2] == HEAD
    assert {line.count("|") for line in lines[2:]} == {HEAD.count("|")}
    assert "2.50 (2.00 to 3.00)" in lines[-1]
    assert lines[-1].endswith("| 123 |")
