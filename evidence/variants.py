"""The variants of a training: what travels, and what the optimizer does differently. Each has one place here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from evidence.application import Application, EvidenceError

PAPER_WARMUP = [0.75, 0.9375, 0.984375, 0.996, 0.999]
"""Lin et al. 2018, section 3.3: the sparsity rises exponentially."""


@dataclass(frozen=True)
class Variant:
    """One way to train an application."""

    name: str
    """On the command line and in file names."""
    text: str
    """In the page's tables."""
    compressor: str | None
    """A name of ``Compression``; None: stock Horovod, dense."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the compressor, beside those that follow from the application."""
    clips: Literal["mean", "local", "never"] = "local"
    """Whose norm the application's threshold limits: the mean gradient's, each rank's own before it is accumulated, or
    nothing's."""
    rampup: bool = True
    """Whether the sparsity rises, by the paper's list to 99.9 % or by the one among ``options``."""
    by_steps: bool = False
    """Whether the number of steps of the whole training chooses what is sent."""
    separate_decay: bool = False
    """Whether weight decay stays out of what is compressed: see ``evidence.trainers.optimizers.SeparateDecay``."""

    @property
    def corrects_momentum(self) -> bool:
        """Whether momentum, or Adam's first moment, is the compressor's."""
        return self.compressor == _DGC and self.options.get("momentum") != 0.0


_DGC = "dgc"
_HALVES = {"indices": "uint16", "values": "float16", "small": "int8"}
"""More bytes than by default: what each part of the method is worth was measured with these codecs."""
_ALL = (
    Variant("dense", "dense", None, clips="mean", rampup=False),
    Variant("dgc", "DGC, 99.9 %", _DGC),
    Variant("steps", "DGC, steps=", _DGC, rampup=False, by_steps=True),
    Variant("halves", "DGC, 99.9 %, 16 bits", _DGC, _HALVES),
    # Each leaves one part of the paper out; all are options of the compressor.
    Variant("no-correction", "no momentum correction", _DGC, {**_HALVES, "momentum": 0.0}),
    Variant("no-masking", "no momentum factor masking", _DGC, {**_HALVES, "momentum_masking": False}),
    Variant("no-warmup", "no warm-up", _DGC, {**_HALVES, "sparsity": 0.999}, rampup=False),
    Variant("no-clipping", "no clipping", _DGC, _HALVES, clips="never"),
    Variant("no-feedback", "no error feedback", _DGC, {**_HALVES, "error_feedback": False}),
    # The family at its defaults: momentum stays in the optimizer.
    Variant("topk", "topk", "topk", clips="mean", rampup=False),
    Variant("onebit", "onebit", "onebit", clips="mean", rampup=False),
    Variant("qsgd", "qsgd", "qsgd", clips="mean", rampup=False),
    Variant("terngrad", "terngrad", "terngrad", clips="mean", rampup=False),
    Variant(
        "authors", "the authors'", _DGC, {**_HALVES, "weight_decay": 0.0, "values": "float32"}, separate_decay=True
    ),
)
VARIANTS = {variant.name: variant for variant in _ALL}
ABLATIONS = ("no-correction", "no-masking", "no-warmup", "no-clipping", "no-feedback")
FAMILY = ("topk", "onebit", "qsgd", "terngrad")


def variant_of(name: str) -> Variant:
    """The variant of this name.

    Raises:
        EvidenceError: there is none.
    """
    if name not in VARIANTS:
        raise EvidenceError(f"there is no variant {name!r}; there are {', '.join(VARIANTS)}")
    return VARIANTS[name]


def compressor_options(
    variant: Variant, application: Application, steps: int, momentum: float | None
) -> dict[str, Any]:
    """Keyword options of the variant's compressor.

    Args:
        variant: one that compresses.
        application: its threshold, its epochs and the length of its warm-up.
        steps: of one epoch.
        momentum: None: whatever the optimizer has is taken over. A number where the optimizer cannot be asked.
    """
    options: dict[str, Any] = {}
    if variant.rampup:
        options.update(sparsity=PAPER_WARMUP, rampup_step=application.rampup_epochs * steps)
    if variant.by_steps:
        # Adam goes on by what it has received of late: what is sent twice, for want of masking, counts twice.
        options.update(steps=application.epochs * steps, momentum_masking=momentum is not None)
    if variant.compressor == _DGC and momentum is not None:
        options["momentum"] = momentum
    if variant.clips == "local" and application.clip is not None:
        options.update(local_grad_clip_norm=application.clip, clip_scope="global")
    return {**options, **variant.options}
