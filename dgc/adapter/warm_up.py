"""Warm-up before the first step: two threads act as ranks and exchange small tensors, which compiles all kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from dgc.core.codecs import INDEX_CODECS, VALUE_CODECS
from dgc.core.collectives import Transport
from dgc.core.compressors import OWN_NUMBERS, compressor_class, compressor_names, make_config
from dgc.core.config import DGCConfig
from dgc.core.exchange.exchange import Exchange
from dgc.core.exchange.owners import SUM_VALUES
from dgc.core.kernels.base import Kernels
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.layout import Parameter, make_layout
from dgc.transport.local import run_ranks

Chosen = TypeVar("Chosen")

_SHAPES = {"matrix": (400, 400), "small": (64,)}  # the matrix is large enough for several threads
_STEPS = 3  # the first step may be dense, and the second one has no thresholds yet

_warm: set[DGCConfig] = set()  # options whose kernels were compiled in this process


def compiled(config: DGCConfig, choose: Callable[[], Chosen], kernels_of: Callable[[Chosen], Kernels]) -> Chosen:
    """Call ``choose``, compile everything that steps with these options need, and return the result of ``choose``.

    ``kernels_of`` takes the kernels out of that result. The processes of a host share the work and wait for each other;
    see :func:`dgc.core.kernels.compile.compiling`. There is no other communication.
    """
    from dgc.core.kernels.compile import BusyError, compiling  # this import loads Numba

    if compressor_class(config.algorithm).number not in OWN_NUMBERS:
        # A user's compressor is not called before the first step; compile the kernels that it shares with dgc.
        config = dataclasses.replace(config, algorithm="dgc", own=None)
    small = _of_small_tensors(config)
    known = small in _warm
    clips = "" if config.local_grad_clip_norm is None else "-clip"
    name = f"{config.algorithm}-{config.indices}-{config.value_codec}-{config.small}{clips}"

    def codecs() -> None:
        if not known:
            with compiling(f"codecs-{name}", part="codecs"):
                _run_steps(small, ReferenceKernels())
                # Owners code their sums with other codecs. The steps above do not use them: two ranks always gather.
                for sums in SUM_VALUES.get(config.value_codec, ()):
                    codec, bounds = VALUE_CODECS[sums], np.array([0, 1])
                    block = np.zeros(codec.max_bytes(1, 1), np.uint8)
                    codec.encode(np.ones(1, np.float32), bounds, block)
                    codec.decode(block, 1, bounds)

    def everything() -> Chosen:
        chosen = choose()
        kernels = kernels_of(chosen)
        codecs()
        if not (known or kernels.on_device):
            _run_steps(small, kernels)
        _warm.add(small)
        return chosen

    try:
        with compiling(name, patience=0):
            return everything()
    except BusyError:  # another process of this host compiles the kernels; compile the codecs meanwhile
        codecs()
        with compiling(name):
            return everything()


def _of_small_tensors(config: DGCConfig) -> DGCConfig:
    """Return options that make a few steps of small tensors run all code that a real training runs."""
    return dataclasses.replace(
        config,
        error_feedback=config.error_feedback and "classic",
        late=False,
        momentum=config.momentum or 0.9,
        min_numel=1024,
        include=(),
        exclude=(),
        bucket_bytes=2**30,
        hierarchical=False,
        rampup_begin_step=min(config.rampup_begin_step, 1),
        sparsity=tuple(filter(None, config.sparsities)) or config.sparsities,
    )


def _run_steps(config: DGCConfig, kernels: Kernels) -> None:
    layout = make_layout([Parameter(name, shape, "float32") for name, shape in _SHAPES.items()], config)

    def one_rank(transport: Transport) -> None:
        exchange = Exchange(layout, config, transport, kernels)
        try:
            for _ in range(_STEPS):
                for index, parameter in enumerate(layout.parameters):
                    gradient = np.sin(np.arange(parameter.numel, dtype=np.float32))
                    exchange.submit(index, gradient, np.empty_like(gradient))
                exchange.finish()
        finally:
            exchange.close()

    run_ranks(2, one_rank, timeout=3600.0)


def compile_all() -> str:
    """Compile the kernels of all compressors and codecs with default options; return the kernels' folder."""
    from dgc.core.kernels import choose_kernels
    from dgc.core.kernels.compile import cache_directory

    cases: list[tuple[str, dict[str, object]]] = [(name, {}) for name in compressor_names()]
    cases += [("qsgd", {"norm": "max"}), ("dgc", {"local_grad_clip_norm": 1.0})]
    cases += [("dgc", {"indices": name}) for name in INDEX_CODECS]
    cases += [("dgc", {"values": name, "small": name}) for name in VALUE_CODECS]
    for name, options in cases:
        compiled(make_config(options, algorithm=name), lambda: choose_kernels("cpu"), lambda kernels: kernels)
    return cache_directory()
