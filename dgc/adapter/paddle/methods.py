"""What ``DGCMomentum`` has in every framework beside the methods of the framework's optimizers."""

from __future__ import annotations

from typing import Any

from dgc.adapter.compressor import CompressorBase
from dgc.adapter.engine import EngineBase
from dgc.adapter.metrics import Metrics
from dgc.core.exchange.records import Stats


class ExchangeMethods:
    """Mixed into an optimizer: methods that are its exchange's."""

    @property
    def _exchanges(self) -> EngineBase | CompressorBase[Any]:
        raise NotImplementedError

    @property
    def stats(self) -> Stats:
        """Bytes, densities and seconds of the exchange."""
        return self._exchanges.stats

    def describe(self) -> dict[str, Any]:
        """What the next step will do, for a log: step, density, end of the ramp-up, shares, buckets, transport."""
        return self._exchanges.describe()

    def log_to(self, writer: object, every: int = 100, prefix: str = "compression") -> None:
        """Write what residuals hold back; see :meth:`dgc.adapter.metrics.CompressorMetrics.log_to`.

        Raises:
            ConfigError: the writer has no ``add_scalar``, or ``every`` is no number of steps.
        """
        self._exchanges.log_to(writer, every, prefix)

    @property
    def inside(self) -> Metrics:
        """The latest step that was looked at, by the tensors' names."""
        return self._exchanges.inside

    def reset(self) -> None:
        """Forget momentum, residuals, the step and the statistics; call it on all ranks."""
        self._exchanges.reset()

    def close(self) -> None:
        """End the communication thread."""
        self._exchanges.close()
