"""The torch engine by itself, on ranks that are threads of this process."""

import pytest
import torch

from dgc.core.compressors import make_config
from dgc.errors import LayoutError
from dgc.torch.engine import Engine
from dgc.transport.local import run_ranks


def test_a_failure_after_the_last_bucket_reaches_all_ranks_in_the_next_step():
    def step(engine):
        for i, p in enumerate(engine.parameters):
            gradient = torch.ones_like(p)
            engine.submit(i, gradient)

    def one_rank(transport):
        generator = torch.Generator().manual_seed(0)
        parameters = [(n, torch.randn(64, 64, generator=generator).requires_grad_()) for n in "ab"]
        engine = Engine(parameters, make_config({"sparsity": 0.9}), transport, optimizer=None)
        begun = []
        engine.on_step_begin = lambda: begun.append(True)
        step(engine)
        engine.exchange.wait()
        if transport.rank == 0:
            with pytest.raises(LayoutError, match=r"^too late"):
                engine.fail(LayoutError("too late"))
            with pytest.raises(LayoutError, match=r"^too late"):
                engine.finish()
        else:
            engine.finish()

        def next_step():
            step(engine)
            engine.finish()

        for _ in range(2):
            with pytest.raises(LayoutError, match="rank 0 failed in step 1: too late"):
                next_step()
        assert len(begun) == 2
        engine.reset()
        next_step()
        engine.close()

    run_ranks(2, one_rank)
