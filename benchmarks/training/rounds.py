"""One rank's measurement: the methods take steps in turn, a block each in every round."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from typing import Any

import torch
from network.links import own_counters

from training.methods import ALONE, Trained, make
from training.models import TASKS
from training.summary import PARTS
from training.threads import Threads

USAGE = {"page_faults": "ru_minflt", "switches_voluntary": "ru_nvcsw", "switches_involuntary": "ru_nivcsw"}


class Rank:
    """This rank's methods, and what their steps took.

    Args:
        model: a name of ``TASKS``.
        methods: names of ``METHODS``.
        warm: steps of each method that do not count.
        weight_decay: of all optimizers; None leaves the task's own.
    """

    def __init__(self, model: str, methods: Sequence[str], warm: int, weight_decay: float | None = None) -> None:
        self.task = TASKS[model]
        self.threads = Threads()
        self.rank, self.size = 0, 1
        self._barrier: Any = lambda: None
        # Horovod's thread asks the others every millisecond whether there is something to do: where nothing is ever
        # exchanged it is not even started.
        if not set(methods) <= set(ALONE):
            import horovod.torch as hvd

            hvd.init()
            self.threads.new("horovod", "mpi")
            self.rank, self.size, self._barrier = hvd.rank(), hvd.size(), hvd.barrier
        generator = torch.Generator().manual_seed(self.rank)
        self._batches = [self.task.draw(generator) for _ in range(4)]
        self._trained = {}
        for method in methods:
            self._trained[method] = make(method, self.task, weight_decay)
            if method == "powersgd":
                self.threads.new("gloo", "gloo")
        self.parameters = sum(p.numel() for p in self._trained[methods[0]].model.parameters())
        self.rows: dict[str, dict[str, Any]] = {m: {"blocks": [], "steps": []} for m in methods}
        for method in methods:
            for number in range(warm):
                self._step(self._trained[method], number)

    def round(self, number: int, steps: int) -> None:
        """Let each method take ``steps`` steps after one that does not count; another one begins in each round."""
        methods = list(self._trained)
        begin = number % len(methods)
        for method in methods[begin:] + methods[:begin]:
            self._block(method, steps)

    def _block(self, method: str, steps: int) -> None:
        trained = self._trained[method]
        # What the methods before left in the caches is not this one's.
        self._step(trained, 0)
        self._barrier()
        before = self._counts()
        rows = [self._step(trained, i + 1) for i in range(steps)]
        after = self._counts()
        self.rows[method]["steps"] += rows
        self.rows[method]["blocks"].append(
            {
                "seconds": sorted(sum(row[part] for part in PARTS) for row in rows)[len(rows) // 2],
                **{
                    group: {k: (after[group][k] - before[group].get(k, 0)) / steps for k in after[group]}
                    for group in after
                },
                "memory": {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024},
            }
        )

    def _step(self, trained: Trained, number: int) -> dict[str, Any]:
        """Seconds of each part of a step, and what the compressor says of it."""
        batch = self._batches[number % len(self._batches)]
        times = [time.perf_counter()]
        trained.optimizer.zero_grad()
        times.append(time.perf_counter())
        loss = self.task.loss(trained.model, batch)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        trained.optimizer.step()
        times.append(time.perf_counter())
        row: dict[str, Any] = {part: b - a for part, a, b in zip(PARTS, times, times[1:], strict=False)}
        if trained.compression is not None:
            last = trained.compression.stats.last.as_dict()
            row["phases"], row["density"], row["handed_over"] = last["seconds"], last["density"], last["bytes_sent"]
        return row

    def _counts(self) -> dict[str, dict[str, float]]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        wire: dict[str, float] = {
            f"{device}_{way}": n[way] for device, n in own_counters().items() for way in ("sent", "received")
        }
        return {
            "bytes": wire,
            "cpu": self.threads.seconds(),
            "kernel": {name: getattr(used, field) for name, field in USAGE.items()},
        }
