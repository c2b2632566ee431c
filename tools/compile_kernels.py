#!/usr/bin/env python3
"""Compile what Numba compiles into its cache, in several processes; a few seconds where all of it is cached already.

The kernels, the loops of the codecs, and those of every registered compressor.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def compile_kernels() -> None:
    from dgc.core.kernels.cpu import NumbaKernels

    for threads in (1, 2):
        NumbaKernels(threads).warm_up()


def compile_codecs() -> None:
    import numpy as np

    from dgc.core import codecs
    from dgc.core.codecs import SmallCodec, SparseCodec
    from dgc.core.compressors import make_config
    from dgc.core.layout import Parameter, make_layout

    positions, values, out = np.arange(4), np.ones(4, np.float32), np.zeros(256, np.uint8)
    for indices in map(codecs.index_codec, codecs.index_codec_names()):
        indices.encode(positions, 64, out)
        indices.decode(out, 64, 4)
    for codec in map(codecs.value_codec, codecs.value_codec_names()):
        codec.encode(values, np.array([0, 4]), out)
        codec.decode(out, 4, np.array([0, 4]))
    tensors = [Parameter("w", (64, 64), "float32"), Parameter("b", (64,), "float32")]
    (bucket,) = make_layout(tensors, make_config({})).buckets
    SparseCodec(bucket, 4, "uint16", "float16").encode(positions, values, out)
    small = SmallCodec(bucket, "int3")
    block, x = np.empty(small.max_bytes, np.uint8), np.ones(small.size, np.float32)
    small.encode(x, block, np.empty_like(x))
    small.add(block, x)


def compile_compressors() -> None:
    """Two steps of one rank with each compressor that has loops of its own; types share most of them."""
    import numpy as np

    from dgc.core.compressors import make_config
    from dgc.core.exchange.exchange import Exchange
    from dgc.core.kernels.reference import ReferenceKernels
    from dgc.core.layout import Parameter, make_layout
    from dgc.transport.local import run_ranks

    cases = [(name, {}) for name in ("onebit", "qsgd", "terngrad", "dorefa")]
    cases += [("qsgd", {"norm": "max"})]

    def one_rank(transport) -> None:
        for name, options in cases:
            config = make_config({"min_numel": 0, **options}, algorithm=name)
            exchange = Exchange(
                make_layout([Parameter("w", (16, 16), "float32")], config), config, transport, ReferenceKernels()
            )
            for _ in range(2):
                gradient = np.linspace(-1, 1, 256, dtype=np.float32)
                exchange.submit(0, gradient, np.empty_like(gradient))
                exchange.finish()
            exchange.close()

    run_ranks(1, one_rank, timeout=600)


JOBS = [compile_kernels, compile_codecs, compile_compressors]


def main() -> None:
    # A fresh interpreter for each worker: Numba's threads do not survive a fork.
    with ProcessPoolExecutor(min(len(JOBS), os.cpu_count() or 1), get_context("spawn")) as pool:
        for done in [pool.submit(job) for job in JOBS]:
            done.result()


if __name__ == "__main__":
    main()
