"""A Horovod and an engine without a framework: NumPy tensors, and ranks that are threads."""

from types import SimpleNamespace

import numpy as np

from dgc.adapter.engine import EngineBase
from dgc.adapter.job import Horovod
from dgc.core.exchange.exchange import Exchange
from dgc.core.exchange.step import Hyper
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.layout import Parameter, make_layout


class FakeSet:
    """A Horovod process set."""

    def __init__(self, number, ranks, own=0):
        self.process_set_id, self._ranks, self._own = number, ranks, own

    def included(self):
        return self._own in self._ranks

    def size(self):
        return len(self._ranks)

    def rank(self):
        return self._own


class FakeHorovod(Horovod):
    """Horovod as rank 0 of two sees it; ``module_of`` replaces the module."""

    framework, module_name, package = "Frame", "horovod.frame", "dgc.frame"

    def __init__(self, *, initialized=True, size=2, module_of=None, transport=None):
        self.transport = transport
        self.everyone = FakeSet(0, range(size))
        self.hvd = module_of or SimpleNamespace(
            allreduce=None,
            is_initialized=lambda: initialized,
            rank=lambda: 0,
            global_process_set=self.everyone,
            Average="the average",
            Sum="the sum",
            Adasum="adasum",
            Compression=SimpleNamespace(none="none of theirs", fp16="fp16 of theirs"),
        )
        self.asked = []

    def load(self):
        if isinstance(self.hvd, Exception):
            raise self.hvd
        return self.hvd

    def gather_bytes(self, message, name):
        self.asked.append(name)
        return np.concatenate([message, message])

    def own_transport(self):
        raise NotImplementedError

    def make_transport(self, choice="auto"):
        return (
            super().make_transport(choice) if self.transport is None or not isinstance(choice, str) else self.transport
        )


class FakeEngine(EngineBase):
    """Without ``names`` nothing is exchanged until :meth:`open`."""

    what, advice = "tensors", "Give every rank the same tensors."

    def __init__(self, transport, config, names=("a", "b"), numel=2048, bad=False):
        super().__init__(config, transport)
        self.cleared = 0

        def build():
            if bad:
                raise ValueError("no memory")
            self.names = list(names)
            self.adoption = SimpleNamespace(hyper=Hyper.uniform(len(names) or 2, config), active=False)
            layout = make_layout([Parameter(n, (numel // 32, 32), "float32") for n in names or ("a", "b")], config)
            if names:
                self._exchange = Exchange(layout, config, transport, ReferenceKernels())
            return layout

        self._agree_on_options()
        self._agree_on_tensors(build)

    def open(self):
        self._exchange = Exchange(self.layout, self._config, self.transport, ReferenceKernels())
        self._close_when_dropped()

    def step(self, number=0, scale=1.0):
        """One step, of gradients times ``scale``; returns the results."""
        results = []
        for i, p in enumerate(self.layout.parameters):
            rng = np.random.default_rng([number, self.transport.rank, i])
            results.append(np.empty(p.numel, np.float32))
            self._exchange.submit(i, rng.standard_normal(p.numel).astype(np.float32) * np.float32(scale), results[-1])
        self._exchange.finish()
        self._after_step()
        return results

    def fail(self, error):
        self._exchange.fail(error)

    def _extra_state(self):
        return {"count": 0 if self._exchange is None else 1}

    def _take_state(self, saved):
        self._exchange.load_state_dict(saved)

    def _clear(self):
        self.cleared += 1
