"""Figures in README and on the pages for users are those of benchmarks/results."""

import json
import re
import statistics
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"
METHODS = {
    "dense": "dense", "fp16": "fp16", "PowerSGD, rank 1": "powersgd-1", "PowerSGD, rank 4": "powersgd-4", "dgc": "dgc",
    "dgc, hook": "dgc-hook",
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


def of(rows, setting, figure="loss", **where):
    """The figures of the rows with this setting, and with these other values."""
    return [row[figure] for row in rows if {"setting": setting, **where}.items() <= row.items()]


def numbers(text):
    return [float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def test_the_same_model_beside_pytorchs_hooks():
    """Milliseconds, kB and accuracies of the results, and README's accuracies."""
    rows = rows_of("powersgd")
    times = {(r["model"], r["rate"], r["method"]): 1000 * r["seconds"] for r in rows if "rate" in r}
    sent = {(r["model"], r["method"]): r["bytes"] / 1000 for r in rows if r.get("rate") == "100mbit"}
    accuracies = {(r["model"], r["method"]): r["accuracy"] for r in rows if "accuracy" in r}
    ((_, given),) = table_with("docs/results.md", *METHODS)
    for name, cells in given.items():
        method = METHODS[name]
        for at, model in ((0, "mlp"), (4, "lstm")):
            expected = [times[model, rate, method] for rate in ("10gbit", "1gbit", "100mbit")] + [sent[model, method]]
            found = [number for cell in cells[at : at + len(expected)] for number in numbers(cell)]
            assert found == pytest.approx(expected, abs=0.6), (name, model)
        found = [number for cell in cells[-2:] for number in numbers(cell)]
        expected = [accuracies[f"digits, {kind}", method] for kind in ("CNN", "LSTM")]
        assert found == pytest.approx(expected, abs=0.06), name
    for kind in ("CNN", "LSTM"):
        dense, ours, hook = (accuracies[f"digits, {kind}", method] for method in ("dense", "dgc", "dgc-hook"))
        assert ours == hook
        assert f"| {kind} for digits, SGD, accuracy | 2 | 840 | {dense:.1f} % | {ours:.1f} % |" in text_of("README.md")


def test_trainings_with_sgd():
    """``make evidence`` writes evidence.md from the results; the rows of the pages are its rows."""
    sections = text_of("benchmarks/evidence.md").replace(" %", "").split("## ")
    ((_, table),) = [(heads, rows) for heads, rows in tables("docs/results.md") if "99.9 %" in heads]
    found = []
    for name, (_, dense, whole, fewer, steps, fewer_steps) in table.items():
        found += [(name, dense, each, ratio) for each, ratio in ((whole, fewer), (steps, fewer_steps)) if each]
    ((_, readme),) = table_with("README.md", "CNN for digits, SGD, accuracy")
    speech = "bidirectional LSTM for speech, SGD, letters wrong"
    found.append((speech, *readme[speech][2:]))
    assert len(found) == 7
    for name, dense, ours, fewer in found:
        said = [each.replace(" (one seed)", "").replace(" %", "") for each in (dense, ours)]
        wanted = [f"| dense | {said[0]} |", f"| {said[1]} |", f"| {fewer} |"]
        assert any(all(text in section for text in wanted) for section in sections), name


def test_the_larger_gpts_with_classic_error_feedback():
    behind = [distance(name) for name in ("adaptive-gpt-10m", "adaptive-gpt-19m")]
    page, readme = text_of("docs/results.md"), text_of("README.md")
    for steps, far in zip(("600", "1,000"), behind, strict=True):
        assert f"one seed | {steps} | {far:+.1f} % |" in page
    assert f"ended {behind[0]:.1f} and {behind[1]:.1f} % behind" in readme
    assert f"{behind[0]:.1f} % behind at 10.8 million parameters, {behind[1]:.1f} % at 19.5 million" in page


def distance(result):
    """How many percent the loss with ``steps=`` is above the dense one, in the longest training that has both."""
    losses = {(row["setting"], row["steps"]): row["loss"] for row in rows_of(result)}
    steps = max(steps for setting, steps in losses if setting == "steps" and ("dense", steps) in losses)
    return 100 * (losses["steps", steps] / losses["dense", steps] - 1)


AGAINST = {
    "dense": "dense", "16 bits": "fp16", "PowerSGD, rank 4": "powersgd=4", "PowerSGD, rank 32": "powersgd=32",
    "1-bit Adam's method (ours)": "onebit=0.15", "dgc, `steps=`, classic": "steps", "dgc, `steps=`": "ahead",
}  # fmt: skip


ALIKE = {"onebit=0.2": "onebit=0.15"}  # the timed steps are those after the dense ones


def test_the_alternatives_with_adamw():
    """Losses of two models, and the medians of the seconds of a step."""
    ((heads, said),) = table_with("docs/results.md", *AGAINST)
    assert heads[-2:] == ["1 Gbit/s", "100 Mbit/s"]
    trained = [row for row in rows_of("adaptive-gpt") if row["steps"] == 1200]
    both = [*rows_of("adaptive-gpt-10m"), *rows_of("step-ahead-gpt-10m")]
    larger = {row["setting"]: row for row in both if row["steps"] == 600 and row["seed"] == 0}
    runs = {}
    for row in rows_of("adaptive-gpt-10m-steps"):
        runs.setdefault((ALIKE.get(row["setting"], row["setting"]), row["rate"]), []).append(row)
    for name, setting in AGAINST.items():
        small, (loss_of_larger,), (fewer,), (sent,), *seconds = map(numbers, said[name])
        rows = [row for row in trained if row["setting"] == setting and row["seed"] < 3]
        assert len(rows) == (0 if setting == "ahead" else 3), name
        assert small == ([round(statistics.fmean(row["loss"] for row in rows), 3)] if rows else []), name
        assert loss_of_larger == round(larger[setting]["loss"], 3), name
        assert fewer == pytest.approx(larger[setting]["fewer"], abs=0.5), name
        timed = [runs[setting, rate] for rate in ("1gbit", "100mbit")]
        assert sent == pytest.approx(timed[0][0]["step_bytes"] / 1e6, abs=0.051 if sent > 9 else 0.0051), name
        expected = [statistics.median(row["step"] for row in each) for each in timed]
        assert [second for (second,) in seconds] == pytest.approx(expected, abs=0.0051), name
    late = [statistics.median(row["step"] for row in runs["ahead,late=1", rate]) for rate in ("1gbit", "100mbit")]
    assert f"took {late[0]:.2f} s at 1 Gbit/s and {late[1]:.2f} s at 100 Mbit/s" in text_of("docs/results.md")
    first = [statistics.median(row["step"] for row in runs["ahead,density=0.1", rate]) for rate in ("1gbit", "100mbit")]
    said_of_it = [runs["ahead,density=0.1", "1gbit"][-1]["step_bytes"] / 1e6, *first]
    assert "sends {:.2f} MB and took {:.2f} and {:.2f} s".format(*said_of_it) in text_of("docs/results.md")
    assert "sends {:.2f} MB and takes {:.2f} and {:.2f} s".format(*said_of_it) in text_of("README.md")
    ((_, short),) = table_with("README.md", "dense", "16 bits")
    assert len(short) >= 4
    for name, cells in short.items():
        assert cells == said[name][-3:], name


DISTANCES = {
    "a GPT of 0.37 M parameters, rate 0.002": ("adaptive-gpt", ",lr=0.002", (1200,)),
    "a GPT of 0.4 M parameters": ("adaptive-gpt-plain", "", (300, 1000)),
    "a GPT of 10.8 M parameters": ("adaptive-gpt-10m", "", (600,)),
    "a GPT of 19.5 M parameters": ("adaptive-gpt-19m", "", (1000,)),
    "tabular regression": ("adaptive-table", "", (1000,)),
}


def test_distances_from_dense_with_classic_error_feedback():
    """Of the means of the seeds that both have."""
    ((_, table),) = [(heads, rows) for heads, rows in tables("docs/results.md") if "distance from dense" in heads]
    for name, (result, suffix, steps) in DISTANCES.items():
        (cells,) = [cells for first, cells in table.items() if first.startswith(name)]
        rows = rows_of(result)
        for said, count in zip(cells[1].split(";"), steps, strict=True):
            means = [statistics.fmean(of(rows, setting + suffix, steps=count)) for setting in ("dense", "steps")]
            assert said.strip() == f"{100 * (means[1] / means[0] - 1):+.1f} %", (name, count)
        assert set(map(round, of(rows, "steps", "fewer"))) == {int(cells[2])}, name
    dense, ours = (
        statistics.fmean(of(rows_of("adaptive-vit"), setting, "accuracy", steps=1000)) for setting in ("dense", "steps")
    )
    gain = ours - dense
    (cells,) = [cells for first, cells in table.items() if first.startswith("a ViT")]
    assert cells[1] == f"{gain:+.1f} points"


def test_steps_beside_those_without_exchange():
    names = {
        "plain, ranks meet before each update": "none-meeting", "dgc, our wrapper": "dgc-b",
        "dgc, Horovod's wrapper": "dgc-a",
    }  # fmt: skip
    ((_, table),) = table_with("docs/results.md", *names)
    for column, model in enumerate(("mlp", "lstm", "resnet50")):
        rows = {row["method"]: row for row in rows_of(f"end-to-end-{model}")}
        assert table["plain momentum SGD, no exchange"][column] == f"{1000 * rows['none']['seconds']:.1f} ms"
        for name, method in names.items():
            middle, least, most = rows[method]["ratio_to_none"]
            assert table[name][column] == f"{middle:.2f} ({least:.2f} to {most:.2f})", (name, model)


def test_steps_of_four_hosts_beside_sixteen_bits():
    names = {"an MLP of 23.0": "mlp", "an LSTM of 19.8": "lstm", "a Transformer of 24.1": "transformer"}
    rows = {(row["model"], row["method"]): row for row in rows_of("end-to-end-4-hosts")}
    for page, methods in (
        ("docs/results.md", ("none", "dense", "fp16", "dgc-steps")),
        ("README.md", ("dense", "fp16", "dgc-steps")),
    ):
        ((_, table),) = [(heads, each) for heads, each in tables(page) if heads[0] == "a step of"]
        assert len(table) == len(names)
        for first, cells in table.items():
            (model,) = [model for name, model in names.items() if first.startswith(name)]
            assert numbers(first)[0] == pytest.approx(rows[model, "none"]["parameters"] / 1e6, abs=0.051)
            found = [number for cell in cells[: len(methods)] for number in numbers(cell)]
            assert found == pytest.approx([1000 * rows[model, method]["seconds"] for method in methods], abs=0.51)
            if page == "docs/results.md":
                assert numbers(cells[-1])[0] == pytest.approx(
                    rows[model, "dgc-steps"]["bytes"]["eth0_sent"] / 1e6, abs=0.0051
                )


def test_steps_of_sixteen_hosts():
    names = {
        "nothing is sent, ranks meet": "none-meeting", "dense (Horovod)": "dense", "0.1 %, gathered": "gather-0.1",
        "0.1 %, owners add up": "auto-0.1", "5 %, gathered": "gather-5", "5 %, owners add up": "auto-5",
    }  # fmt: skip
    ((_, table),) = table_with("docs/results.md", *names)
    times = {(row["rate"], row["method"]): f"{1000 * row['seconds']:,.0f}" for row in rows_of("many-ranks-time")}
    for name, method in names.items():
        assert table[name][:2] == [times["1gbit", method], times["100mbit", method]], name


def test_traffic_on_many_ranks():
    rows = json.loads((RESULTS / "many-ranks-bytes.json").read_text())
    found = {(r["density"], r["ranks"]): r for r in rows if r["model"] == "resnet50"}
    ((_, table),) = table_with("docs/options.md", "64", "1,024")
    for ranks, (dense, *cells) in table.items():
        for cell, (density, way) in zip(
            cells, [(each, way) for each in (0.001, 1 / 64) for way in ("auto", "gather")], strict=True
        ):
            row = found[density, int(ranks.replace(",", ""))]
            megabytes, fewer = numbers(cell.replace("x fewer", ""))
            assert numbers(dense) == [pytest.approx(row["dense"] / 1e6, abs=0.51)], ranks
            assert megabytes == pytest.approx(row[way] / 1e6, rel=0.07), (ranks, way)
            assert fewer == pytest.approx(row["dense"] / row[way], rel=0.06, abs=0.5), (ranks, way)


SHOWN = {
    "dense": "dense", "step-ahead, `steps=400`": "ahead", "the same with `late=True`": "ahead,late=1",
    "classic, `steps=400`": "steps",
}  # fmt: skip


# What steps= chooses for classic error feedback, by hand.
CLASSIC = "density=0.05,ramp=0.2,first=0.15,beta2=0.99,from=0.3,values=int4"


def test_single_seeds_differ_as_much_after_a_small_change_of_the_initial_weights():
    rows = [*rows_of("step-ahead-gpt-64-perturbed"), *rows_of("step-ahead-gpt-64")]

    def losses(setting):
        found = {row["seed"]: row["loss"] for row in rows if row["setting"] == setting}
        return [found[seed] for seed in range(7)]

    dense, page = losses("dense"), " ".join(text_of("docs/results.md").split())
    for setting, said in (
        ("ahead", "between {:.1f} % below and {:.1f} % above dense, {:.1f} % above on"),
        ("dense,jitter=1e-3", "between {:.1f} % below and {:.1f} % above dense training without noise, {:.1f} % below"),
    ):
        behind = [100 * (a / d - 1) for a, d in zip(losses(setting), dense, strict=True)]
        mean = 100 * (sum(losses(setting)) / sum(dense) - 1)
        assert (mean > 0) == said.endswith("above on"), setting
        assert said.format(-min(behind), max(behind), abs(mean)) in page, setting


def test_step_ahead_beside_dense_and_classic():
    """The table of the results, by seed, and the row of README."""
    rows = rows_of("step-ahead-gpt-64")
    found = {setting: [row for row in rows if row["setting"] == setting] for setting in SHOWN.values()}
    ((_, said),) = table_with("docs/results.md", *SHOWN)
    for name, setting in SHOWN.items():
        losses = ", ".join(f"{row['loss']:.3f}" for row in found[setting])
        assert said[name] == [losses, f"{found[setting][0]['fewer']:.0f}"], name
    rows = rows_of("step-ahead-gpt-no-steps")
    without = {
        "step-ahead without `steps=`; first, second, third and sixth seed": "ahead,steps=0",
        "step-ahead with `sparsity=0.999`": "ahead,density=0.001",
        "classic with `sparsity=0.999`": "classic",
    }
    for name, setting in without.items():
        chosen = [row for row in rows if row["setting"] == setting]
        assert said[name] == [", ".join(f"{row['loss']:.3f}" for row in chosen), f"{chosen[0]['fewer']:.0f}"], name
    for result, task, figure, digits in (("table", "tabular", "loss", 3), ("vit", "a ViT", "accuracy", 1)):
        rows = rows_of(f"step-ahead-{result}")
        ((_, others),) = table_with("docs/results.md", "tabular regression, 1,500 steps, loss")
        (cells,) = [cells for name, cells in others.items() if name.startswith(task)]
        for cell, setting in zip(cells, ("dense", "ahead", "steps"), strict=True):
            assert numbers(cell) == [round(each, digits) for each in of(rows, setting, figure)], task
    ((_, settings),) = table_with("docs/results.md", "the small GPT with Lion, two ranks of 32 sequences, three seeds")
    small, large = rows_of("step-ahead-gpt-64"), [*rows_of("adaptive-gpt-10m"), *rows_of("step-ahead-gpt-10m")]
    largest = [*rows_of("adaptive-gpt-19m"), *rows_of("step-ahead-gpt-19m")]
    known = {row["setting"]: row["loss"] for row in largest if row["steps"] == 400}
    ahead, classic = (100 * (known[word] / known["dense"] - 1) for word in ("ahead", CLASSIC))
    said = f"larger one was {ahead:.1f} % behind with step-ahead, and {classic:.1f} % with classic"
    assert said in (readme := text_of("README.md"))
    assert f"at 19.5 million {ahead:.1f} % after 400 steps, classic {classic:.1f} %" in text_of("docs/results.md")
    for name, words, among in (
        ("a GPT of 10.8 M", ("dense", "ahead", "steps"), [row for row in large if row["steps"] == 600]),
        ("a GPT of 19.5 M", ("dense", "ahead", CLASSIC), [row for row in largest if row["steps"] == 400]),
        ("the same, 1,000 steps", ("dense", "ahead", "steps"), longest := [r for r in largest if r["steps"] == 1000]),
        ("the small GPT, 2,000 steps", ("dense", "ahead,steps=0"), longer := rows_of("step-ahead-gpt-2000")),
        ("the small GPT with Lion", ("dense", "ahead"), rows_of("step-ahead-gpt-64-lion")),
        ("the same with RMSprop", ("dense", "ahead"), rows_of("step-ahead-gpt-64-rmsprop")),
        ("the same with Adafactor", ("dense", "ahead"), rows_of("step-ahead-gpt-64-adafactor")),
        ("the same with a Muon", ("dense", "ahead"), rows_of("step-ahead-gpt-64-muon")),
        ("the small GPT, resumed", ("dense", "ahead,saved=1"), [row for row in small if row["seed"] == 0]),
    ):
        (cells,) = [cells for each, cells in settings.items() if each.startswith(name)]
        for cell, word in zip(cells, words, strict=False):
            assert numbers(cell) == [round(loss, 3) for loss in of(among, word)], (name, word)
    (dense,), (ahead,) = ([row for row in longest if row["setting"] == word] for word in ("dense", "ahead"))
    assert f"the same, 1,000 steps ({ahead['fewer']:.0f} times fewer bytes)" in text_of("docs/results.md")
    said = f"{100 * (ahead['loss'] / dense['loss'] - 1):.1f} %"
    assert f"after 1,000 steps it was {said} behind with step-ahead" in readme
    assert f"but {said} after 1,000 steps" in text_of("docs/results.md")
    assert f"2,000 steps without `steps=` ({longer[1]['fewer']:.0f} times fewer bytes)" in text_of("docs/results.md")
    both = [of(large, word, steps=600) for word in ("dense", "ahead")]
    losses = " | ".join(f"{statistics.fmean(each):.3f}" for each in both)
    assert f"| 2 | 600 | {losses} | {of(large, 'ahead', 'fewer', steps=600)[0]:.0f}x |" in readme
    behind = [100 * (a / d - 1) for d, a in zip(*both, strict=True)]
    said = " and ".join(f"{each:.1f}" for each in behind)
    assert f"With step-ahead {said} % at 10.8 million (two seeds)" in text_of("docs/results.md")
    dense, ahead = (statistics.fmean(row["loss"] for row in found[setting]) for setting in ("dense", "ahead"))
    assert f"| 2 | 400 | {dense:.3f} | {ahead:.3f} | {found['ahead'][0]['fewer']:.0f}x |" in readme
    distances = [100 * (a["loss"] / d["loss"] - 1) for d, a in zip(found["dense"], found["ahead"], strict=True)]
    *others, worst = sorted(distances)
    assert len(distances) == 7
    assert f"Six of the seven seeds ended at most {others[-1]:.1f} % behind dense, and one {worst:.1f} %" in readme
    assert f"with step-ahead one of seven seeds ended {worst:.0f} % behind" in text_of("docs/results.md")
    first, classic = (found[setting][0]["loss"] for setting in ("dense", "steps"))
    behind = 100 * (classic / first - 1)
    assert f"ended at {classic:.3f} instead of {first:.3f}, {behind:.0f} % behind dense" in readme


def test_step_ahead_on_more_than_two_ranks():
    page, readme = text_of("docs/results.md"), text_of("README.md")
    behind = {}
    for ranks, name, methods in (
        (4, "four ranks of 16 sequences", ("dense", "ahead")),
        (8, "eight ranks of 8 sequences", ("dense", "ahead", "steps")),
        (16, "16 ranks of 4 sequences, threads", ("dense", "ahead")),
    ):
        rows = sorted(rows_of(f"step-ahead-gpt-{ranks}-ranks"), key=lambda row: row["seed"])
        losses = {row["setting"]: [each["loss"] for each in rows if each["setting"] == row["setting"]] for row in rows}
        assert {len(losses[word]) for word in ("dense", "ahead")} == {3}
        said = " | ".join(", ".join(f"{loss:.3f}" for loss in losses[word]) for word in methods)
        assert f"{name}, three seeds | {said} |" in page
        means = {word: statistics.fmean(each) for word, each in losses.items()}
        behind[ranks] = {word: 100 * (mean / means["dense"] - 1) for word, mean in means.items()}
        (fewer,) = {f"{row['fewer']:.0f}" for row in rows if row["setting"] == "ahead"}
        share = {4: "on four ranks 3.2 % of the entries", 8: "on eight ranks 5 %", 16: "on 16 ranks 10 %"}[ranks]
        assert f"{share}, {fewer} times fewer bytes, {behind[ranks]['ahead']:.1f} % behind" in page
        if ranks == 8:
            assert f"| 8 | 400 | {means['dense']:.3f} | {means['ahead']:.3f} | {fewer}x |" in readme
    rows = rows_of("step-ahead-gpt-64-ranks")
    (fewer,) = of(rows, "ahead", "fewer", seed=0)
    dense, ahead = (of(rows, word) for word in ("dense", "ahead"))
    lost = f"{100 * (statistics.fmean(ahead) / statistics.fmean(dense) - 1):.1f} % behind"
    dense, ahead = (" and ".join(f"{loss:.3f}" for loss in each) for each in (dense, ahead))
    assert f"50 %, {fewer:.0f} times fewer bytes, {lost} (threads, two seeds: {ahead}, dense {dense})" in page
    rows = rows_of("step-ahead-gpt-32-ranks")
    dense, half = (" and ".join(f"{loss:.3f}" for loss in of(rows, word)) for word in ("dense", "ahead"))
    assert f"32 ranks of two sequences each ended with 50 % at {half} (dense {dense})" in page
    assert f"**With 0.1 %** four ranks end {behind[4]['ahead,density=0.001']:.0f} % behind" in page


def test_a_smaller_beta1():
    rows = rows_of("step-ahead-gpt-64-beta1")
    pairs = zip(of(rows, "ahead"), of(rows, "dense"), strict=True)
    mean = statistics.fmean(100 * (ours / dense - 1) for ours, dense in pairs)
    assert f"the small GPT ends {mean:.1f} % behind with step-ahead (seven seeds)" in text_of("docs/results.md")


def test_local_steps():
    found = {row["setting"]: f"{row['loss']:.3f}" for row in rows_of("step-ahead-gpt-64-peers")}
    said = f"ended at {found['local=80']}, and DiLoCo with 80 local steps at {found['diloco=80']}"
    assert said in text_of("docs/results.md")


def test_step_ahead_with_sgd():
    page = text_of("docs/results.md")
    for task, text in (
        ("lstm", "an LSTM ended at a loss of {:.3f}, with `steps=` at {:.3f} and dense at {:.3f}"),
        ("cnn", "A CNN ended at {:.3f}, with `steps=` at {:.3f} and dense at {:.3f}"),
        ("unet", "a U-Net that removes noise at {:.2f}, with `steps=` at {:.2f} and dense at {:.2f} (means of three"),
    ):
        rows, words = rows_of(f"step-ahead-{task}"), ("ahead,density=0.01", "steps", "dense")
        assert text.format(*(statistics.fmean(of(rows, word, steps=500)) for word in words)) in page
        assert {round(fewer, -1) for fewer in of(rows, words[0], "fewer", steps=500)} == {170}


def test_sgd_in_a_longer_training():
    page = text_of("docs/results.md")
    for task, name, digits in (("cnn", "CNN", 3), ("unet", "U-Net", 2), ("lstm", "LSTM", 3)):
        line = f"| {name}"
        for word in ("dense", "steps", *(f"ahead,density={d}" for d in ("0.002", "0.001", "0.0005"))):
            rows = [r for r in rows_of(f"step-ahead-{task}") if (r["steps"], r["setting"]) == (2000, word)]
            assert len(rows) == 3
            line += f" | {statistics.fmean(row['loss'] for row in rows):.{digits}f}"
            line += "" if word == "dense" else f", {rows[0]['fewer']:.0f}x"
        assert f"{line} |" in page
