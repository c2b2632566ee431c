"""Trainings in Keras on living ranks."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import horovod.tensorflow as hvd
from worker_tools import case

from evidence.applications import application_class
from evidence.trainers.base import Task
from evidence.trainers.keras_trainer import KerasTrainer
from evidence.variants import variant_of


def run(folder, keep_first_to=None):
    trainer = KerasTrainer(Task(application_class("image_keras")("tiny", 0), variant_of("dgc"), folder))
    record = trainer.resume()

    def end_of_epoch(epoch, loss):
        # Rank 0 writes the record for all.
        loss = trainer.sums([loss])[0]
        record.append({"epoch": epoch + 1, "loss": loss, "metrics": trainer.evaluate()})
        trainer.save(record)
        hvd.allgather_object(0, name="meet")
        if epoch == 0 and keep_first_to is not None and hvd.rank() == 0:
            shutil.copytree(folder, keep_first_to)

    trainer.run(len(record), end_of_epoch)
    return record, trainer.summary()


@case
def a_training_goes_on_bit_for_bit_from_its_first_checkpoint():
    made = tempfile.mkdtemp(prefix="dgc-evidence-") if hvd.rank() == 0 else ""
    base = Path(hvd.broadcast_object(made, 0, name="folder"))
    try:
        whole, end = run(base / "whole", base / "kept")
        resumed, resumed_end = run(base / "kept")
        assert resumed == whole
        assert resumed_end == end
        assert end["replicas_identical"]
        assert end["parameters_sparsified"] > 0
    finally:
        hvd.allgather_object(0, name="meet")
        if hvd.rank() == 0:
            shutil.rmtree(base, ignore_errors=True)
