"""``benchmarks/evidence.md``: written from the results alone, every number and every sentence about numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from evidence.application import EvidenceError, Metric
from evidence.applications import CLASSES
from evidence.data.cache import write_atomically
from evidence.plan import VARIANTS_OF, plan
from evidence.report import tables
from evidence.report.groups import CLOSE, WANTED_RATIO, Group, Groups, load_groups, verdict
from evidence.report.plots import plot_curves
from evidence.variants import ABLATIONS, FAMILY, VARIANTS

HEAD = f"""# Does it train?

The three kinds of application of the paper (Lin et al. 2018), dense beside DGC at 99.9 % with the paper's warm-up, from
the same seeds on the same data; two of them also in few steps, with `steps=` beside it. `make evidence` trains what has
no result in `benchmarks/results/evidence` yet and writes this page; a call that was interrupted goes on where it
stopped. `make evidence-quick` does everything once, small.

Target: DGC's mean metric is within one standard deviation of dense, within {100 * CLOSE:g} % of it, or better, at
{WANTED_RATIO} times fewer bytes or more in everything that is sent after the warm-up. Bytes are all that a
rank hands to collectives for its gradients; of dense training, 4 bytes a parameter and step.
"""


def write_page(results: Path, page: Path, missing: Mapping[str, str]) -> None:
    """Write the page, and its plots into a folder of its name beside it.

    Args:
        results: folder of the results.
        page: the file to write.
        missing: applications that could not run here, each with a sentence about what they need.

    Raises:
        EvidenceError: there are no results, or they do not fit together, or files cannot be written.
    """
    groups = load_groups(results)
    if not groups:
        raise EvidenceError(f"there are no results in {results}: call python -m evidence first")
    text = Page(groups, missing, page).text()
    write_atomically(page, lambda file: file.write(text.encode()))


class Page:
    """The parts of the page."""

    def __init__(self, groups: Groups, missing: Mapping[str, str], page: Path) -> None:
        """Look at what there is.

        Args:
            groups: the results.
            missing: as for :func:`write_page`.
            page: where the page will lie.
        """
        self._groups, self._missing, self._page = groups, missing, page
        first = {name: group.runs[0] for (name, _), group in reversed(groups.items())}
        self._titles = {name: str(first[name]["title"]) for name in CLASSES if name in first}
        self._metrics = {name: [Metric(**metric) for metric in first[name]["metrics"]] for name in self._titles}
        self._facts = {name: first[name]["facts"] for name in self._titles}

    def text(self) -> str:
        """All of it; plots are written on the way."""
        parts = [HEAD, *self._scale(), "## In one table\n", *self._summary()]
        for name, title in self._titles.items():
            parts += [f"## {title}\n", *self._application(name)]
        return "\n".join([*parts, "## Where, and how long\n", *self._where()]).rstrip() + "\n"

    def _scale(self) -> list[str]:
        scale = next(iter(self._groups.values())).runs[0]["scale"]
        said = f"**These are the small trainings of `--{scale}`, which show that all works and no more.**\n"
        return [] if scale == "full" else [said]

    def _summary(self) -> list[str]:
        deciding = {name: metrics[0] for name, metrics in self._metrics.items()}
        parts = [tables.summary(self._groups, self._titles, deciding), ""]
        parts.append(
            "Mean ± standard deviation of the seeds; sd: in standard deviations of dense; fewer bytes: in everything "
            "sent after the warm-up; whole run: the warm-up included.\n"
        )
        parts += [f"- {name} was left out: {sentence}" for name, sentence in self._missing.items()]
        missing = self._without_result()
        if missing:
            parts.append(f"- No result yet, of the full plan: {', '.join(missing)}.")
        return [*parts, ""]

    def _without_result(self) -> list[str]:
        """Of the variants in the plan those without any run."""
        wanted = {(run.application, run.variant) for run in plan([0])}
        return [f"{name} {variant}" for name, variant in sorted(wanted) if (name, variant) not in self._groups]

    def _application(self, name: str) -> list[str]:
        facts, metrics = self._facts[name], self._metrics[name]
        own = [self._groups[name, variant] for variant in VARIANTS_OF[name] if (name, variant) in self._groups]
        pair = [group for group in own if group.variant in ("dense", "dgc", "halves", "steps")]
        names = list(self._titles)
        before = {sentence for other in names[: names.index(name)] for sentence in self._facts[other].values()}
        parts = [f"- {key.capitalize()}: {sentence}." for key, sentence in facts.items() if sentence not in before]
        same = [key for key, sentence in facts.items() if sentence in before]
        parts += [f"- The same as above: {', '.join(same)}."] if same else []
        parts += (
            ["", tables.variants(pair, pair[0], metrics[0]), "", self._plot(pair, metrics[0], name)] if pair else [""]
        )
        dgc, dense = self._groups.get((name, "dgc")), self._groups.get((name, "dense"))
        halves = self._groups.get((name, "halves"))
        parts += self._beside(name, "What each part of DGC is for", "ablations", ABLATIONS, halves, dense)
        parts += self._beside(name, "The family at its defaults", "family", FAMILY, dense, dgc)
        parts += self._authors(name, halves)
        return parts

    def _beside(
        self, name: str, title: str, plot: str, variants: Sequence[str], base: Group | None, other: Group | None
    ) -> list[str]:
        """A section of variants, beside one that all are compared with; nothing where none was trained."""
        own = [self._groups[name, variant] for variant in variants if (name, variant) in self._groups]
        if not own or base is None:
            return []
        metric = self._metrics[name][0]
        all_ = [base, *([other] if other is not None else []), *own]
        ordered = sorted(own, key=lambda group: verdict(base, group, metric).worse)
        best, worst = ordered[0], ordered[-1]
        ends = [best] if best is worst else [best, worst]
        found = " and ".join(f"{self._than(base, one, metric)} with {VARIANTS[one.variant].text}" for one in ends)
        sentence = (
            f"Beside {VARIANTS[base.variant].text}, {metric.name} is {found}; {self._within(base, own, metric)}.\n"
        )
        return [
            f"### {title}\n",
            tables.variants(all_, base, metric),
            "",
            sentence,
            self._plot(all_, metric, f"{name}-{plot}"),
        ]

    @staticmethod
    def _than(base: Group, group: Group, metric: Metric) -> str:
        return tables.relative(verdict(base, group, metric).worse)

    @staticmethod
    def _within(base: Group, groups: list[Group], metric: Metric) -> str:
        deviation = base.deviation(metric.name)
        if deviation is None:
            return "of one seed, so that small differences say nothing"
        near = [g for g in groups if abs(g.mean(metric.name) - base.mean(metric.name)) <= deviation]
        names = ", ".join(VARIANTS[group.variant].text for group in near)
        return f"within one standard deviation of it: {names or 'none'}"

    def _authors(self, name: str, base: Group | None) -> list[str]:
        own = self._groups.get((name, "authors"))
        if own is None or base is None:
            return []
        metric = self._metrics[name][0]
        return [
            "### The authors' momentum correction\n",
            "The formulas of the paper have no weight decay in them. Taken as they stand, the momentum of the loss' "
            "gradient alone is corrected, and weight decay, which every rank knows, has a momentum of its own where "
            "the weights are updated and is never compressed. Here it is added to the gradient first, as "
            "`torch.optim.SGD` does, and is sent with it. Values are sent as float32 there; here as float16, and the "
            "rounding error stays in the residual.\n",
            tables.variants([base, own], base, metric),
            "",
            self._plot([base, own], metric, f"{name}-authors"),
        ]

    def _plot(self, groups: list[Group], metric: Metric, name: str) -> str:
        folder = self._page.with_suffix("")
        plot_curves(groups, metric, folder / f"{name}.svg")
        return f"![{metric.name} over the epochs]({folder.name}/{name}.svg)\n"

    def _where(self) -> list[str]:
        runs = [run for group in self._groups.values() for run in group.runs]
        machines = sorted({run["where"]["machine"] for run in runs})
        devices = sorted({run["device"] for run in runs})
        versions: dict[str, set[str]] = {}
        for run in runs:
            for package, version in {**run["where"]["versions"], "Python": run["where"]["python"]}.items():
                versions.setdefault(package, set()).add(version)
        listed = ", ".join(f"{package} {'/'.join(sorted(found))}" for package, found in sorted(versions.items()))
        hours = sum(run["seconds"] for run in runs) / 3600
        return [
            f"- Machine: {'; '.join(machines)}; trained on: {', '.join(devices)}.",
            f"- Versions: {listed}.",
            f"- {len(runs)} trainings, {hours:.2f} hours of training and evaluation in all, without the starts of "
            "processes.",
            "",
            tables.durations(self._groups, self._titles),
        ]
