"""Figures in README and on the pages are those of benchmarks/results, and the same wherever they are given."""

import json
import re
import statistics
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"
METHODS = {
    "dense": "dense", "dense DDP": "dense", "fp16": "fp16", "PowerSGD, rank 1": "powersgd-1",
    "PowerSGD, rank 4": "powersgd-4", "dgc": "dgc", "dgc, hook": "dgc-hook", "dgc's optimizer, without DDP": "dgc",
}  # fmt: skip


def text_of(page):
    return " ".join((REPOSITORY / page).read_text().split())


def rows_of(result):
    return json.loads((RESULTS / f"{result}.json").read_text())["rows"]


def tables(page):
    """The tables of a page: for each the heads, and the cells of each row by the first one."""
    for block in re.findall(r"(?:^\|.*\n)+", (REPOSITORY / page).read_text(), re.MULTILINE):
        heads, _, *rows = ([cell.strip() for cell in line.strip()[1:-1].split("|")] for line in block.splitlines())
        yield heads, {row[0]: row[1:] for row in rows}


def table_with(page, *firsts):
    """The tables that have these rows, by their names."""
    return [(heads[1:], rows) for heads, rows in tables(page) if set(firsts) <= set(rows)]


def numbers(text):
    return [float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def test_the_same_model_beside_pytorchs_hooks():
    """In milliseconds, in five places; and the kB and accuracies of the tables."""
    rows = rows_of("powersgd")
    times = {(r["model"], r["rate"], r["method"]): 1000 * r["seconds"] for r in rows if "rate" in r}
    sent = {(r["model"], r["method"]): r["bytes"] / 1000 for r in rows if r.get("rate") == "100mbit"}
    accuracies = {(r["model"], r["method"]): r["accuracy"] for r in rows if "accuracy" in r}
    (full,) = table_with("docs/performance.md", "PowerSGD, rank 4", "dgc, hook")
    (short,) = table_with("docs/coming-from.md", "PowerSGD, rank 4", "dgc, hook")
    for (_, given), model_at in ((full, (0, 4)), (short, (0, 2))):
        rates = ("10gbit", "1gbit", "100mbit") if given is full[1] else ("1gbit",)
        for name, cells in given.items():
            method = METHODS[name]
            for at, model in zip(model_at, ("mlp", "lstm"), strict=True):
                expected = [times[model, rate, method] for rate in rates] + [sent[model, method]]
                found = [number for cell in cells[at : at + len(expected)] for number in numbers(cell)]
                assert found == pytest.approx(expected, abs=0.6), (name, model)
            found = [number for cell in cells[-2:] for number in numbers(cell)]
            expected = [accuracies[f"digits, {kind}", method] for kind in ("CNN", "LSTM")]
            assert found == pytest.approx(expected, abs=0.06), name
    dense, hook, own = (f"{times['mlp', '1gbit', method]:.0f} ms" for method in ("dense", "dgc-hook", "dgc"))
    sentence = (
        f"{dense} a step with dense `DistributedDataParallel`, {hook} with dgc's hook and {own} with dgc's optimizer"
    )
    assert sentence in text_of("README.md")
    assert sentence in text_of("docs/index.md")
    assert f"a step took {own} with the optimizer, {hook} with the hook, and {dense} with dense DDP" in text_of(
        "docs/faq.md"
    )


def test_the_results_of_readme_are_those_of_the_trainings():
    """``make evidence`` writes evidence.md from the results."""
    sections = text_of("docs/evidence.md").replace(" %", "").split("## ")
    (table,) = [rows for heads, rows in tables("README.md") if heads[-1] == "fewer bytes"]
    assert len(table) >= 7
    for name, (_, dense, dgc, fewer) in table.items():
        mean = dgc.replace("(one seed)", "").replace(" %", "").strip()
        wanted = [f"| dense | {dense.replace(' %', '')} |", f"| {mean} |", f"| {fewer} |"]
        assert any(all(text in section for text in wanted) for section in sections), name


SECTIONS = {
    "adaptive-gpt": ("GPT", "loss", 3),
    "adaptive-table": ("Tabular", "loss", 3),
    "adaptive-vit": ("ViT", "accuracy", 1),
}


@pytest.mark.parametrize("result", SECTIONS)
def test_trainings_with_adamw(result):
    """Values of all seeds, in order, or of those that one cell says."""
    kind, figure, digits = SECTIONS[result]
    found = {}
    for row in rows_of(result):
        found.setdefault((row["setting"], row["steps"]), []).append(round(row[figure], digits))
    ((heads, short),) = table_with("docs/adamw.md", "dense, every seed")
    (column,) = [i for i, head in enumerate(heads) if head.startswith(kind)]
    (steps,) = numbers(heads[column])
    settings = {"dense, every seed": "dense", "`steps=`, every seed": "steps", "PowerSGD, rank 4": "powersgd=4"}
    for name, setting in settings.items():
        said = numbers(re.sub(r"\(.*\)", "", short[name][column]))
        assert said == found[setting, int(steps)], (name, kind)
    longer = [
        (name, cells)
        for _, rows in tables("docs/adamw.md")
        for name, cells in rows.items()
        if name.startswith(kind + ",")
    ]
    assert len(longer) == 2
    for name, cells in longer:
        (steps,) = numbers(name)
        for setting, cell in zip(("dense", "steps,values=int2"), cells[:2], strict=True):
            assert numbers(cell) == found[setting, int(steps)], name


def test_the_larger_gpt():
    rows = {row["setting"]: row for row in rows_of("adaptive-gpt-10m") if row["steps"] == 2000}
    dense, ours, theirs = (rows[name] for name in ("dense", "steps,values=int2", "powersgd=4"))
    said = text_of("docs/adamw.md")
    assert f"Dense ends at {dense['loss']:.3f} nats a byte" in said
    assert f"`steps=` at {ours['loss']:.3f} with {ours['fewer']:.0f} times fewer bytes" in said
    assert f"PowerSGD of rank 4 at {theirs['loss']:.3f} with {theirs['fewer']:.0f} times fewer" in said
    largest = {row["setting"]: row["loss"] for row in rows_of("adaptive-gpt-19m") if row["steps"] == 1000}
    assert f"| 1,000 | {largest['steps'] / largest['dense'] - 1:+.1%} |".replace("%", " %") in said
    assert f"ended at {largest['steps']:.3f} after 1,000 steps" in said
    assert f"dense training at {largest['dense']:.3f}." in said


AGAINST = {
    "dense": "dense", "16 bits": "fp16", "PowerSGD, rank 4": "powersgd=4", "PowerSGD, rank 32": "powersgd=32",
    "1-bit Adam's method (ours)": "onebit=0.15", "dgc, `steps=`": "steps",
}  # fmt: skip


def test_the_alternatives_with_adamw():
    """Losses of two models; seconds are the processor's and those of the bytes on a link that carries 94 %."""
    ((heads, said),) = table_with("docs/coming-from.md", *AGAINST)
    assert heads[-2:] == ["1 Gbit/s", "100 Mbit/s"]
    trained = [row for row in rows_of("adaptive-gpt") if row["steps"] == 1200]
    larger = {row["setting"]: row for row in rows_of("adaptive-gpt-10m") if row["steps"] == 600}
    steps = {row["setting"].partition("=0.")[0]: row for row in rows_of("adaptive-gpt-10m-steps")}
    for name, setting in AGAINST.items():
        (loss,), (loss_of_larger,), (fewer,), (sent,), *seconds = map(numbers, said[name])
        rows = [row for row in trained if row["setting"] == setting and row["seed"] < 3]
        step = steps[setting.partition("=0.")[0]]
        assert len(rows) == 3, name
        assert loss == round(statistics.fmean(row["loss"] for row in rows), 3), name
        assert loss_of_larger == round(larger[setting]["loss"], 3), name
        assert fewer == pytest.approx(larger[setting]["fewer"], abs=0.5), name
        assert sent == pytest.approx(step["step_bytes"] / 1e6, abs=0.051 if sent > 9 else 0.0051), name
        expected = [step["processor"] + step["step_bytes"] * 8 / (0.94 * rate) for rate in (1e9, 1e8)]
        assert [second for (second,) in seconds] == pytest.approx(expected, abs=0.0051), name
