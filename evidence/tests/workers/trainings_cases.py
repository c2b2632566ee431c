"""Trainings in PyTorch on living ranks: what they count, and that they go on where they stopped."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from pathlib import Path

import horovod.torch as hvd
from worker_tools import case

from evidence import rank
from evidence.applications import application_class
from evidence.trainers.base import Task
from evidence.trainers.torch_trainer import TorchTrainer
from evidence.variants import variant_of


def folder():
    made = tempfile.mkdtemp(prefix="dgc-evidence-") if hvd.rank() == 0 else ""
    return Path(hvd.broadcast_object(made, 0, name="folder"))


def meet():
    """Wait for all ranks."""
    hvd.allgather_object(0, name="meet")


def trained(application, variant, where, name="result.json"):
    task = Task(application_class(application)("tiny", 0), variant_of(variant), where / "run")
    rank.train(task, where / name)
    return hvd.broadcast_object(json.loads((where / name).read_text()) if hvd.rank() == 0 else None, 0, name="result")


def without_times(result):
    return [{key: value for key, value in epoch.items() if "seconds" not in key} for epoch in result["curve"]]


def goes_on_after_its_first_checkpoint(application, variant):
    """The checkpoint of the first epoch is what a run leaves that is killed in its second."""
    where, save = folder(), TorchTrainer.save

    def save_and_keep(self, record):
        save(self, record)
        meet()
        if len(record) == 1 and hvd.rank() == 0:
            shutil.copytree(where / "run", where / "kept")

    TorchTrainer.save = save_and_keep
    try:
        whole = trained(application, variant, where)
    finally:
        TorchTrainer.save = save
    assert not (where / "run").exists()
    meet()
    if hvd.rank() == 0:
        (where / "kept").rename(where / "run")
    meet()
    resumed = trained(application, variant, where, "resumed.json")
    for again, before in zip(without_times(resumed), without_times(whole), strict=True):
        assert again == before, f"the run that went on: {again}; the whole one: {before}"
    assert resumed["digest"] == whole["digest"]
    if hvd.rank() == 0:
        shutil.rmtree(where)


@case
def a_dense_training_goes_on_bit_for_bit():
    goes_on_after_its_first_checkpoint("language", "dense")


@case
def a_compressed_training_with_normalisation_goes_on_bit_for_bit():
    goes_on_after_its_first_checkpoint("image", "dgc")


@case
def speech_goes_on_bit_for_bit():
    goes_on_after_its_first_checkpoint("speech", "dgc")


@case
def bytes_are_those_of_the_compressor():
    where = folder()
    result = trained("transformer", "dgc", where)
    first, last = result["curve"][0], result["curve"][-1]
    assert result["ranks"] == 2
    assert result["replicas_identical"]
    assert math.isfinite(result["final"]["perplexity"])
    assert result["dense_bytes_per_step"] == 4 * result["parameters"]
    assert last["bytes"] < first["bytes"] / 3
    assert last["bytes"] % last["steps"] == 0
    assert 0.9 < result["parameters_sparsified"] / result["parameters"] < 1
