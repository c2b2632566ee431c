"""Training in Keras 3 by ``fit``, as a Keras script does it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import dgc.tensorflow.keras as dgc
from evidence.application import EvidenceError
from evidence.data.cache import write_atomically
from evidence.trainers.base import EndOfEpoch, Record, Task, add_up
from evidence.variants import compressor_options

RECORD = "record.json"


class KerasTrainer:
    """See ``evidence.trainers.base.Trainer``."""

    def __init__(self, task: Task) -> None:
        """Build model and optimizer; ``fit`` broadcasts them."""
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()
        self._task = task
        self.device = _choose_device()
        keras.utils.set_random_seed(task.application.seed)
        self._steps = task.application.steps(self.size)
        self._epochs_made = self._counted = 0
        self.model = task.application.make_model()
        optimizer = task.application.make_optimizer(self.model)
        self._rate = float(optimizer.learning_rate.numpy())
        self.model.compile(
            # Horovod's own wrapper does not average under Keras 3; ours without a compressor is a plain average.
            optimizer=dgc.DistributedOptimizer(optimizer, compression=self._compression()),
            loss=self._loss(),
            jit_compile=False,
        )

    def _compression(self) -> Any:
        variant = self._task.variant
        if variant.compressor is None:
            return None
        if (variant.clips == "mean" and self._task.application.clip is not None) or variant.separate_decay:
            raise EvidenceError(f"the variant {variant.name!r} is made for PyTorch alone")
        options = compressor_options(variant, self._task.application, self._steps, None)
        return getattr(dgc.Compression, variant.compressor)(**options)

    def _loss(self) -> Any:
        def application_loss(targets: Any, outputs: Any) -> Any:
            return self._task.application.loss(self.model, (targets, outputs))

        return application_loss

    def resume(self) -> Record:
        """Take up the run's checkpoint, if there is one; returns the record of the epochs it has made."""
        path = self._task.folder / RECORD
        record: Record = json.loads(path.read_text()) if path.exists() else []
        counts = self._gather(float(len(record)))
        if (counts != counts[0]).any():
            raise EvidenceError(f"the ranks see different checkpoints in {self._task.folder}; it must be shared")
        if record:
            objects = {"application_loss": self._loss()}
            self.model = dgc.load_model(str(self._model_file(len(record))), custom_objects=objects)
        return record

    def _model_file(self, epoch: int) -> Path:
        return self._task.folder / f"model-{epoch:03d}.keras"

    def run(self, first: int, end_of_epoch: EndOfEpoch) -> None:
        """Train the epochs from ``first`` on."""
        application = self._task.application
        callbacks: list[Any] = [
            dgc.callbacks.BroadcastGlobalVariablesCallback(0),
            dgc.callbacks.LearningRateScheduleCallback(
                self._rate,
                lambda epoch: application.rate(epoch / application.epochs),
                staircase=False,
                steps_per_epoch=self._steps,
            ),
        ]
        if self._task.variant.compressor is not None:
            self._task.folder.mkdir(parents=True, exist_ok=True)
            callbacks.append(dgc.callbacks.CompressionCheckpoint(str(self._task.folder / "compressor-{epoch:03d}")))
            self.model.optimizer.compression.on_step(self._count)

        def at_end(epoch: int, logs: Any) -> None:
            self._epochs_made += 1
            self._average_statistics()
            end_of_epoch(epoch, float(logs["loss"]))

        callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=at_end))
        self.model.fit(
            self._batches(first),
            epochs=application.epochs,
            initial_epoch=first,
            steps_per_epoch=self._steps,
            callbacks=callbacks,
            shuffle=False,
            verbose=0,
        )

    def _batches(self, first: int) -> Iterator[tuple[Any, ...]]:
        for epoch in range(first, self._task.application.epochs):
            yield from self._task.application.batches(epoch, self.rank, self.size)

    def _average_statistics(self) -> None:
        """Make batch normalisation's running statistics, which each rank takes from its own batches, their mean."""
        for place, variable in enumerate(self.model.non_trainable_variables):
            if variable.dtype == "float32":
                mean = hvd.allreduce(tf.convert_to_tensor(variable.value), op=hvd.Average, name=f"statistics.{place}")
                variable.assign(mean)

    def evaluate(self) -> dict[str, float]:
        """The application's metrics of all held-out data, equal on all ranks."""
        own = self._task.application.evaluate(self.model, self.rank, self.size)
        return add_up(self, self._task.application, own)

    def sums(self, values: list[float]) -> list[float]:
        """Each value added up over the ranks, in float64."""
        return hvd.allreduce(tf.constant(values, tf.float64), op=hvd.Sum, name="sums").numpy().tolist()

    def _gather(self, value: float) -> np.ndarray:
        return hvd.allgather(tf.constant([value], tf.float64), name="gather").numpy()

    def bytes_sent(self) -> int:
        """Bytes that this rank has handed to collectives for its gradients since it was built, without saves."""
        if self.model.optimizer.compression is None:
            return self._epochs_made * self._steps * self._dense_bytes
        return self._counted

    def _count(self, step: dict[str, Any]) -> None:
        self._counted += step["bytes_sent"]

    @property
    def _dense_bytes(self) -> int:
        return sum(4 * int(np.prod(v.shape)) for v in self.model.trainable_variables)

    def save(self, record: Record) -> None:
        """Replace the run's checkpoint by the present state: ``record.json`` names the files that belong to it."""
        folder, made = self._task.folder, len(record)
        problem = 0.0
        if self.rank == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self.model.save(self._model_file(made))
                write_atomically(folder / RECORD, lambda file: file.write(json.dumps(record).encode()))
            except (EvidenceError, OSError):
                problem = 1.0
        if self._gather(problem).any():
            raise EvidenceError(f"{folder} cannot be written; make room there, and call again")
        for old in [*folder.glob("model-*"), *folder.glob(f"compressor-*.rank{self.rank}.*")]:
            if f"-{made:03d}." not in old.name and (self.rank == 0 or not old.name.startswith("model")):
                old.unlink(missing_ok=True)

    def summary(self) -> dict[str, Any]:
        """Parameters, how many are sparsified, and whether all ranks ended with the same."""
        digest = hashlib.sha256(b"".join(np.asarray(v).tobytes() for v in self.model.trainable_variables)).digest()
        digests = hvd.allgather(tf.constant([list(digest)], tf.uint8), name="digests").numpy()
        compression = self.model.optimizer.compression
        return {
            "parameters": self._dense_bytes // 4,
            "parameters_sparsified": int(compression.stats.last.sparse_elements) if compression else 0,
            "dense_bytes_per_step": self._dense_bytes,
            "replicas_identical": bool((digests == digests[:1]).all()),
            "digest": digest.hex(),
            "device": self.device,
        }


def _choose_device() -> str:
    """One GPU for each rank of a machine, or its processor."""
    devices = tf.config.list_physical_devices("GPU")
    if devices:
        own = devices[hvd.local_rank() % len(devices)]
        tf.config.set_visible_devices(own, "GPU")
        tf.config.experimental.set_memory_growth(own, True)
        return str(tf.config.experimental.get_device_details(own).get("device_name", "GPU"))
    return "cpu"
