"""Training in PyTorch, as a Horovod script does it."""

from __future__ import annotations

import hashlib
from typing import Any

import horovod.torch as hvd
import torch

import dgc.torch as dgc
from evidence.application import EvidenceError
from evidence.data.cache import write_atomically
from evidence.trainers.base import EndOfEpoch, Record, Task, add_up
from evidence.trainers.optimizers import SeparateDecay, take_first_moment
from evidence.trainers.random_states import random_states, seed_all, set_random_states
from evidence.variants import compressor_options

CHECKPOINT = "checkpoint.pt"


class TorchTrainer:
    """See ``evidence.trainers.base.Trainer``."""

    def __init__(self, task: Task) -> None:
        """Build model and optimizer, equal on all ranks."""
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()
        self._task, application = task, task.application
        if torch.cuda.is_available():
            torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
            self.device = torch.cuda.get_device_name()
        else:
            torch.set_num_threads(1)
            self.device = "cpu"
        seed_all(application.seed)
        self._where = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = application.make_model().to(self._where)
        self._steps = application.steps(self.size)
        self._dense_bytes = self._counted = 0
        self._wrap(application.make_optimizer(self.model))
        # Ranks draw their own dropout, each from a seed of its own.
        seed_all(1000 * application.seed + self.rank + 1)

    def _wrap(self, optimizer: torch.optim.Optimizer) -> None:
        """What a script changes: stock Horovod for dense training, our wrapper and a compressor for all others."""
        variant, application = self._task.variant, self._task.application
        named = list(self.model.named_parameters())
        self._dense_bytes = sum(p.numel() * p.element_size() for _, p in named if p.requires_grad)
        if variant.compressor is None:
            self.compression = None
            # One group: which tensors Horovod adds up together otherwise depends on when they come, and so does the
            # order of additions. A run could not be repeated bit for bit.
            self.optimizer = hvd.DistributedOptimizer(optimizer, named, num_groups=1)
        else:
            options = compressor_options(variant, application, self._steps, self._taken_momentum(optimizer))
            if variant.separate_decay:
                optimizer = _with_separate_decay(optimizer)
            self.compression = getattr(dgc.Compression, variant.compressor)(**options)
            self.compression.on_step(self._count)
            self.optimizer = dgc.DistributedOptimizer(optimizer, named, compression=self.compression)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def _taken_momentum(self, optimizer: torch.optim.Optimizer) -> float | None:
        """A momentum that the compressor does not take over by itself."""
        variant = self._task.variant
        if variant.separate_decay:
            return optimizer.param_groups[0].get("momentum")
        return take_first_moment(optimizer) if variant.corrects_momentum else None

    def resume(self) -> Record:
        """Take up the run's checkpoint, if there is one; returns the record of the epochs it has made."""
        path = self._task.folder / CHECKPOINT
        # Rank 0 looks: on a shared disk the others might see another moment.
        if not hvd.broadcast_object(path.exists(), 0, name="exists"):
            return []
        content = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        if self.compression is not None:
            self.compression.load_state_dict(content["compression"])
        set_random_states(content["random"][self.rank])
        return list(content["record"])

    def run(self, first: int, end_of_epoch: EndOfEpoch) -> None:
        """Train the epochs from ``first`` on."""
        application = self._task.application
        for epoch in range(first, application.epochs):
            self.model.train()
            total = torch.zeros((), dtype=torch.float64)
            for step, batch in enumerate(application.batches(epoch, self.rank, self.size)):
                self._set_rate((epoch + step / self._steps) / application.epochs)
                self.optimizer.zero_grad()
                loss = application.loss(self.model, tuple(self._moved(part) for part in batch))
                loss.backward()
                self._step()
                total += loss.detach().double().cpu()
                if self.compression is None:
                    self._counted += self._dense_bytes
            self._average_statistics()
            end_of_epoch(epoch, float(total) / self._steps)

    def _moved(self, part: Any) -> Any:
        return part.to(self._where) if isinstance(part, torch.Tensor) else part

    def _set_rate(self, progress: float) -> None:
        factor = self._task.application.rate(progress)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def _step(self) -> None:
        """The optimizer's step; where the mean gradient is clipped, between exchange and update."""
        clip = self._task.application.clip
        if clip is None or self._task.variant.clips != "mean":
            self.optimizer.step()
            return
        self.optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()

    def _average_statistics(self) -> None:
        """Make BatchNorm's running statistics, which each rank takes from its own batches, their mean."""
        for name, buffer in self.model.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(hvd.allreduce(buffer, op=hvd.Average, name=f"statistics.{name}"))

    def evaluate(self) -> dict[str, float]:
        """The application's metrics of all held-out data, equal on all ranks."""
        self.model.eval()
        with torch.no_grad():
            own = self._task.application.evaluate(self.model, self.rank, self.size)
        return add_up(self, self._task.application, own)

    def sums(self, values: list[float]) -> list[float]:
        """Each value added up over the ranks, in float64."""
        return hvd.allreduce(torch.tensor(values, dtype=torch.float64), op=hvd.Sum, name="sums").tolist()

    def bytes_sent(self) -> int:
        """Bytes that this rank has handed to collectives for its gradients since it was built, without saves."""
        return self._counted

    def _count(self, step: dict[str, Any]) -> None:
        self._counted += step["bytes_sent"]

    def save(self, record: Record) -> None:
        """Replace the run's checkpoint by the present state, whole or not at all."""
        random = hvd.allgather_object(random_states(), name="random")
        if self.compression is not None:
            self.compression.average(self.optimizer)
        if self.rank == 0:
            content = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            if self.compression is not None:
                content["compression"] = self.compression.state_dict()
            content |= {"record": record, "random": random}
            write_atomically(self._task.folder / CHECKPOINT, lambda file: torch.save(content, file))

    def summary(self) -> dict[str, Any]:
        """Parameters, how many are sparsified, and whether all ranks ended with the same."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        digests = hvd.allgather_object(digest.hexdigest(), name="digests")
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "parameters_sparsified": self.compression.stats.last.sparse_elements if self.compression else 0,
            "dense_bytes_per_step": self._dense_bytes,
            "replicas_identical": len(set(digests)) == 1,
            "digest": digests[0],
            "device": self.device,
        }


def _with_separate_decay(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same learning rate, momentum and weight decay in other places.

    Raises:
        EvidenceError: it is no SGD with one group.
    """
    groups = optimizer.param_groups
    if not isinstance(optimizer, torch.optim.SGD) or len(groups) != 1 or groups[0]["nesterov"]:
        raise EvidenceError("weight decay is taken out of an SGD with one parameter group and without Nesterov only")
    group = groups[0]
    return SeparateDecay(group["params"], lr=group["lr"], decay=group["weight_decay"], decay_momentum=group["momentum"])
