"""The page: its numbers and its sentences follow from the results, and nothing else."""

from __future__ import annotations

import json

import pytest

from evidence.__main__ import PAGE, RESULTS
from evidence.application import EvidenceError
from evidence.report.groups import load_groups
from evidence.report.page import write_page

METRICS = {
    "image": {"name": "accuracy", "better": "higher", "percent": True, "exponential": False},
    "language": {"name": "perplexity", "better": "lower", "percent": False, "exponential": True},
}
METRICS["transformer_short"] = METRICS["language"]


def result(application, variant, seed, final, sent, **more):
    metric = METRICS[application]
    curve = [
        {"epoch": e, "loss": 1.0, "metrics": {metric["name"]: final}, "bytes": 10 * b, "steps": 10, "seconds": 5.0}
        for e, b in ((1, 100_000), (2, sent), (3, sent))
    ]
    return {
        "application": application,
        "variant": variant,
        "seed": seed,
        "scale": "full",
        "ranks": 4,
        "epochs": 3,
        "rampup_epochs": 1,
        "title": f"Title of {application}",
        "metrics": [metric],
        "facts": {"data": "some data", "model": "a model", "training": "SGD"},
        "final": {metric["name"]: final},
        "parameters": 100_000,
        "parameters_sparsified": 99_000,
        "dense_bytes_per_step": 400_000,
        "replicas_identical": True,
        "digest": "",
        "device": "cpu",
        "seconds": 15.0,
        "where": {"machine": "a machine", "python": "3.11.2", "versions": {"torch": "2.13.0"}},
        "curve": curve,
        **more,
    }


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "results").mkdir()

    def write(*results):
        for one in results:
            name = f"{one['application']}-{one['variant']}-{one['seed']}.json"
            (tmp_path / "results" / name).write_text(json.dumps(one))
        return tmp_path / "results"

    return write


def page_of(results):
    page = results.parent / "evidence.md"
    write_page(results, page, {"speech": "espeak is missing: install it"})
    return page.read_text()


def pair(application, dense, dgc, sent):
    return [
        *(result(application, "dense", seed, value, 400_000) for seed, value in enumerate(dense)),
        *(result(application, "dgc", seed, value, sent) for seed, value in enumerate(dgc)),
    ]


def test_a_metric_within_one_deviation_at_the_wanted_ratio_is_reached(folder):
    text = page_of(folder(*pair("language", [50, 51, 52], [51.9, 51.9, 51.9], 1000)))
    assert "| Title of language | perplexity | 51.00 ± 1.00 | 51.90 ± 0.00 | 1.76 % worse, +0.9 sd | 400x |" in text
    # Three epochs of 10 steps: dense 12 MB, DGC 1 MB in the warm-up and 20 kB after it.
    assert "| 12x | yes |" in text


def test_one_that_is_worse_or_sends_too_much_is_not(folder):
    results = folder(*pair("language", [50, 50.1, 50.2], [51, 51, 51], 1000), *pair("image", [0.98], [0.981], 2000))
    text = page_of(results)
    assert "| 1.80 % worse, +9.0 sd | 400x |" in text
    assert "| 0.10 % better | 200x |" in text
    assert text.count("| no |") == 2
    assert "| 98.00 % | 98.10 % |" in text


def test_what_is_missing_and_what_has_no_result_yet_is_said(folder):
    text = page_of(folder(*pair("image", [0.98], [0.98], 1000)))
    assert "- speech was left out: espeak is missing: install it" in text
    assert "No result yet, of the full plan: image authors, image halves, image_keras dense" in text
    assert "trained on: cpu" in text
    assert "torch 2.13.0" in text


def test_variants_stand_beside_what_they_differ_from(folder):
    others = [result("language", "halves", s, v, 1000) for s, v in enumerate([51, 51.4])]
    others += [result("language", "no-masking", s, v, 1000) for s, v in enumerate([51.0, 51.2])]
    others += [result("language", "no-feedback", 0, 80.0, 1000), result("language", "qsgd", 0, 50.2, 50_000)]
    text = page_of(folder(*pair("language", [50, 50.2], [51, 51.4], 1000), *others))
    assert "| no momentum factor masking | 51.10 ± 0.14 | 0.20 % better | 1,000 | 400x | 51.00, 51.20 |" in text
    assert (
        "perplexity is 0.20 % better with no momentum factor masking and 56.25 % worse with no error feedback" in text
    )
    assert "within one standard deviation of it: no momentum factor masking." in text
    assert "| qsgd | 50.20 | 0.20 % worse | 66,667 | 6.0x | 50.20 |" in text  # no warm-up: all counts
    for name in ("language", "language-ablations", "language-family"):
        assert f"](evidence/{name}.svg)" in text


def test_the_same_results_give_the_same_files(folder):
    results = folder(*pair("image", [0.97, 0.98], [0.98, 0.975], 1000))
    text, plot = page_of(results), (results.parent / "evidence" / "image.svg").read_bytes()
    assert page_of(results) == text
    assert (results.parent / "evidence" / "image.svg").read_bytes() == plot
    assert b"<text" in plot
    assert len(plot) < 40_000


def test_results_that_do_not_fit_together_are_refused(folder):
    results = folder(*pair("image", [0.98], [0.98], 1000), result("image", "dense", 1, 0.98, 400_000, epochs=4))
    with pytest.raises(EvidenceError, match="'image' were made with different epochs"):
        load_groups(results)
    (results / "image-dense-1.json").write_text("{}")
    with pytest.raises(EvidenceError, match="image-dense-1"):
        load_groups(results)


@pytest.mark.skipif(not PAGE.exists(), reason="no page yet")
def test_the_page_is_that_of_the_results(tmp_path):
    page = tmp_path / PAGE.name
    write_page(RESULTS, page, {})
    assert page.read_text() == PAGE.read_text()
