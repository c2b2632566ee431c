"""What a training needs to know of its task: data, model, optimizer, loss and metric.

An application is one class in ``evidence/applications/``. It knows nothing of ranks beyond its share of the data, and
nothing of compression: what is exchanged, counted, saved and written down is done around it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

Scale = Literal["full", "quick", "tiny"]
"""full: what the page reports. quick: everything once, in seconds a run. tiny: what the tests run."""
SCALES: tuple[Scale, ...] = ("full", "quick", "tiny")


@dataclass(frozen=True)
class Metric:
    """A figure of merit on held-out data, made of a sum and a count that add up over the ranks."""

    name: str
    """As the page writes it: "accuracy", "perplexity", "character error rate"."""
    better: Literal["higher", "lower"]
    percent: bool = False
    """Whether the page shows 0.9876 as 98.76 %."""
    exponential: bool = False
    """Whether the value is exp(sum / count), as of a perplexity, and not sum / count."""

    def value(self, total: float, count: float) -> float:
        """The metric of everything that was evaluated.

        Args:
            total: the sum over all ranks: right answers, nats, edits.
            count: of what: images, words, characters.
        """
        mean = total / count
        # A training that diverged has a perplexity, too: infinite.
        return (math.exp(mean) if mean < 700 else math.inf) if self.exponential else mean


class Application(Protocol):
    """A task, at one size and with one seed. Building it loads the data that :meth:`prepare` has left in the cache.

    Everything random follows from the seed: the same (seed, epoch, rank, size) gives the same batches in every process,
    so that a resumed run needs to know the epoch alone. Random numbers drawn while a model runs (dropout) are PyTorch's
    global ones, which the loop seeds, saves and restores.
    """

    name: ClassVar[str]
    """On the command line and in file names: "image", "language"."""
    title: ClassVar[str]
    """In the page, a few words."""
    framework: ClassVar[Literal["torch", "keras"]]
    metrics: ClassVar[tuple[Metric, ...]]
    """The first decides; the others are written down beside it."""
    ranks: ClassVar[int]
    """How many ranks the full plan gives it."""

    scale: Scale
    seed: int
    epochs: int
    rampup_epochs: int
    """Epochs over which DGC's sparsity rises to 99.9 % (the paper's warm-up)."""
    clip: float | None
    """The largest L2 norm of the mean gradient; None: it is not clipped. DGC clips each rank's own by it."""

    def __init__(self, scale: Scale, seed: int) -> None:
        """Load the data of this size.

        Args:
            scale: how large data and model are.
            seed: of the order of the data, its augmentation and the initial weights.
        """
        ...

    @classmethod
    def missing(cls) -> str | None:
        """What has to be installed before this application can run, as one sentence; None: it can run."""
        ...

    @classmethod
    def prepare(cls, scale: Scale) -> None:
        """Build the data into the user's cache, in one process, before the ranks start; at once where it is there.

        Raises:
            EvidenceError: the message says what is missing or full.
        """
        ...

    def facts(self) -> dict[str, str]:
        """What the page says of data, model and training, each in a sentence: keys "data", "model", "training"."""
        ...

    def make_model(self) -> Any:
        """A new model on the host; its initial weights follow from the framework's seed, which the caller sets."""
        ...

    def make_optimizer(self, model: Any) -> Any:
        """The optimizer of dense training, at the full learning rate, over ``model``'s parameters."""
        ...

    def rate(self, progress: float) -> float:
        """What the learning rate is multiplied by when ``progress`` (in [0, 1)) of all steps were made."""
        ...

    def steps(self, size: int) -> int:
        """Steps of an epoch, the same on each of ``size`` ranks."""
        ...

    def batches(self, epoch: int, rank: int, size: int) -> Iterator[tuple[Any, ...]]:
        """One rank's share of an epoch: ``steps(size)`` tuples of tensors on the host (NumPy arrays under Keras).

        A step's batch of all ranks together has the same size whatever ``size`` is, so that training does not depend on
        the number of ranks. State that is carried from batch to batch (a recurrent net's) begins anew here.
        """
        ...

    def loss(self, model: Any, batch: tuple[Any, ...]) -> Any:
        """The mean loss of a batch, a scalar to differentiate; the tensors are on the model's device.

        Under Keras: ``batch`` is (targets, outputs), what ``compile(loss=...)`` hands over.
        """
        ...

    def evaluate(self, model: Any, rank: int, size: int) -> dict[str, tuple[float, float]]:
        """One rank's share of the held-out data, without collectives: metric's name -> (sum, count).

        The caller puts a PyTorch model into ``eval`` and turns gradients off, and adds the numbers up over the ranks:
        each held-out item must be counted by exactly one rank.
        """
        ...


class EvidenceError(Exception):
    """Something that the user can mend: the message says what is wrong and what to do."""
