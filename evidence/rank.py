"""What each rank does: train one application in one variant, evaluate and save after every epoch, write the result.

    horovodrun -np 4 python -m evidence.rank language dgc 0 --folder RUN --result language-dgc-0.json

Started by ``evidence.launch``; called again after it was killed, it goes on after the last epoch that was saved.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import facts, one_item_a_line
from evidence.application import SCALES, EvidenceError
from evidence.applications import CLASSES, application_class
from evidence.data.cache import write_atomically
from evidence.guard import end_with
from evidence.trainers.base import Record, Task, Trainer
from evidence.variants import VARIANTS, variant_of


def main(arguments: list[str] | None = None) -> int:
    """Train; returns the exit status."""
    parser = argparse.ArgumentParser(description="One rank of one training of the evidence")
    parser.add_argument("application", choices=CLASSES)
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("seed", type=int)
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--folder", type=Path, required=True, help="of checkpoint and progress")
    parser.add_argument("--result", type=Path, required=True, help="the file to write at the end")
    parser.add_argument("--launcher", type=int, help="process that must live, where it is on this machine")
    args = parser.parse_args(arguments)
    if args.launcher is not None:
        end_with(args.launcher)
    try:
        application = application_class(args.application)(args.scale, args.seed)
        train(Task(application, variant_of(args.variant), args.folder), args.result)
    except EvidenceError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def make_trainer(task: Task) -> Trainer:
    """The trainer of the application's framework."""
    if task.application.framework == "keras":
        from evidence.trainers.keras_trainer import KerasTrainer

        return KerasTrainer(task)
    from evidence.trainers.torch_trainer import TorchTrainer

    return TorchTrainer(task)


def train(task: Task, result: Path) -> None:
    """Train one application in one variant to its end, and let rank 0 write the result.

    Args:
        task: what to train, and where its checkpoint lies.
        result: the file to write; the checkpoint is deleted when it is there.

    Raises:
        EvidenceError: a file cannot be written.
    """
    trainer = make_trainer(task)
    application = task.application
    record = trainer.resume()
    resumed_at = len(record)
    began, sent = time.monotonic(), trainer.bytes_sent()

    def end_of_epoch(epoch: int, loss: float) -> None:
        nonlocal began, sent
        trained = time.monotonic() - began
        metrics = trainer.evaluate()
        total = trainer.bytes_sent()
        loss = trainer.sums([loss])[0] / trainer.size
        entry = {
            "epoch": epoch + 1,
            "loss": loss,
            "metrics": metrics,
            "bytes": total - sent,
            "steps": application.steps(trainer.size),
            "seconds": time.monotonic() - began,
            "seconds_training": trained,
        }
        record.append(entry)
        began, sent = time.monotonic(), total
        if epoch + 1 < application.epochs:
            trainer.save(record)
        if trainer.rank == 0:
            progress = {"epochs": application.epochs, "resumed_at": resumed_at, **entry}
            _write_json(task.folder / "progress.json", progress)

    if resumed_at < application.epochs:
        trainer.run(resumed_at, end_of_epoch)
    summary = trainer.summary()
    if not summary["replicas_identical"]:
        raise EvidenceError("the ranks ended with different parameters")
    if trainer.rank == 0:
        _write_json(result, _result(task, trainer, record, summary))
        shutil.rmtree(task.folder, ignore_errors=True)


def _result(task: Task, trainer: Trainer, record: Record, summary: dict[str, Any]) -> dict[str, Any]:
    application = task.application
    return {
        "application": application.name,
        "variant": task.variant.name,
        "seed": application.seed,
        "scale": application.scale,
        "ranks": trainer.size,
        "epochs": application.epochs,
        "rampup_epochs": application.rampup_epochs,
        "title": application.title,
        "metrics": [dataclasses.asdict(metric) for metric in application.metrics],
        "facts": application.facts(),
        "final": record[-1]["metrics"],
        **summary,
        "seconds": sum(entry["seconds"] for entry in record),
        "where": facts(*_packages(application.framework)),
        "curve": record,
    }


def _packages(framework: str) -> list[str]:
    """Those whose versions the page gives."""
    candidates = ("torch",) if framework == "torch" else ("tensorflow", "tensorflow-cpu", "keras")
    installed = {distribution.name.replace("_", "-") for distribution in importlib.metadata.distributions()}
    return ["numpy", "horovod", *(name for name in candidates if name in installed)]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    data = one_item_a_line(content).encode()
    write_atomically(path, lambda file: file.write(data))


if __name__ == "__main__":
    sys.exit(main())
