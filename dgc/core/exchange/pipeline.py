"""The communication thread: it runs the buckets of each step in a fixed order while the backward pass goes on."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np

from dgc.core.collectives import Transport
from dgc.core.config import DGCConfig
from dgc.core.exchange.bucket import BucketExchange
from dgc.core.exchange.nodes import Announced, NodeSums
from dgc.core.exchange.stages import Event, LatestStep, Stage, as_dgc_error
from dgc.core.exchange.step import Step
from dgc.core.kernels.base import Kernels
from dgc.core.layout import Bucket
from dgc.core.message import RemoteFailure
from dgc.errors import DGCError, StallError, TransportError


def clip_factors(sums_of_squares: np.ndarray, threshold: float, ranks: int, scale: float = 1.0) -> list[float]:
    """Return factors that reduce each gradient's L2 norm to at most ``threshold * sqrt(ranks)``.

    The paper scales its threshold by N^(-1/2), because its gradients are divided by N already. For a gradient that is
    not divided, this means ``||g|| <= c * sqrt(N)``.

    Args:
        sums_of_squares: (S,) float64, each gradient's sum of squares as it arrived.
        threshold: c > 0.
        ranks: N.
        scale: the gradients are multiplied by this (1 / loss scale) before their norm is compared.

    Source: arXiv 1712.01887, section 3.2; Paddle's dgc_clip_by_norm.
    """
    limit = threshold * math.sqrt(ranks)
    # For a small S this is faster than half a dozen NumPy calls.
    return [limit / n if (n := math.sqrt(s) * scale) > limit else 1.0 for s in sums_of_squares.tolist()]


class Clipping:
    """Computes a step's clipping factors, bucket by bucket or for all buckets together.

    Attributes:
        needs_all_gradients: whether one norm is taken over all gradients, so that no bucket may start before all
            gradients have arrived.
    """

    def __init__(self, config: DGCConfig, kernels: Kernels, ranks: int) -> None:
        self.threshold = config.local_grad_clip_norm
        self._kernels = kernels
        self._ranks = ranks
        self.needs_all_gradients = self.threshold is not None and config.clip_scope == "global"

    def fill_in(self, step: Step, buckets: Iterable[Bucket]) -> None:
        """Set the factors of ``buckets``; with a global norm, set those of all gradients at once.

        A dense step is clipped globally or not at all.
        """
        if self.threshold is None:
            return
        chosen: Iterable[int] = range(len(step.scales))
        if not self.needs_all_gradients:
            if step.density is None:
                return
            chosen = [s.parameter for bucket in buckets for s in bucket.sparse]
        squares = self._kernels.sums_of_squares([step.submissions[i].gradient for i in chosen])
        if self.needs_all_gradients:
            squares = np.full(len(squares), squares.sum())
        factors = clip_factors(squares, self.threshold, self._ranks, 1.0 / step.loss_scale)
        for i, factor in zip(chosen, factors, strict=True):
            step.scales[i] *= factor


# Seconds that close() waits for a running collective, which never ends if a rank is gone.
_CLOSE_PATIENCE = 5.0

# Seconds that the caller has to raise the error about a missing rank. After that, the job is ended, because the caller
# may itself wait for that rank, in a collective of Horovod that never ends.
_STALL_PATIENCE = 10.0


class Pipeline:
    """The communication thread, which starts with the first step."""

    def __init__(
        self,
        buckets: Sequence[BucketExchange],
        clipping: Clipping,
        kernels: Kernels,
        latest: LatestStep,
        transport: Transport,
        nodes: NodeSums | None = None,
    ) -> None:
        """``buckets`` are in the order in which they run; ``nodes`` is given if several ranks send as one."""
        self._buckets, self._clipping, self._kernels = buckets, clipping, kernels
        self._latest, self._transport, self._nodes = latest, transport, nodes
        self._prepared = self._clipped = self._summed = 0  # how many buckets are prepared, clipped, summed in the node
        self._postponed: Exception | None = None  # error of a bucket that was prepared before its turn
        self._thread: threading.Thread | None = None

    def start(self, step: Step) -> None:
        """Begin a step, whose gradients arrive from now on. The caller holds the lock."""
        self._prepared = self._clipped = self._summed = 0
        self._postponed = None
        for bucket in self._buckets:
            bucket.start(step)
        self._latest.begin(step)
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="dgc-exchange", daemon=True)
            self._thread.start()

    def close(self) -> bool:
        """End the thread.

        Returns:
            False if the transport must not be closed: the thread is still waiting in it for another rank, or the thread
            belongs to the process that this one was forked from.
        """
        if self._latest.in_child:
            return False
        self._latest.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_PATIENCE)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    # -- inside: the communication thread --------------------------------------------------------------------------

    def _loop(self) -> None:
        latest = self._latest
        self._kernels.adopt_thread()
        while True:
            with latest.lock:
                while latest.stage is not Stage.OPEN and not latest.closed:
                    latest.lock.wait()
                if latest.closed:
                    if latest.stage is Stage.OPEN:
                        latest.break_off(TransportError("this compressor was closed in the middle of a step"))
                    return
            try:
                with quiet():
                    done = self._run_step()
            except RemoteFailure as failure:
                latest.break_off(failure.error)
            except StallError as error:
                latest.break_off(error)
                if not latest.wait_until_raised(_STALL_PATIENCE):
                    self._transport.end_job(error)
            except BaseException as error:
                latest.break_off(as_dgc_error(error))
            else:
                if done:
                    latest.enter(Event.RUN)

    def _run_step(self) -> bool:
        """Run all buckets; return False if the exchange was closed before the end."""
        step = self._latest.step
        assert step is not None, "a step has begun"
        if step.coming_scale is not None and (refused := step.await_scale(step.coming_scale)) is not None:
            self._latest.announce(refused)
        with contextlib.ExitStack() as stack:
            for bucket in self._buckets:
                stack.callback(bucket.settle)
            for index in range(len(self._buckets)):
                if not self._wait_for_gradients(step, index):
                    return False
                self._run_bucket(step, index)
        return True

    def _wait_for_gradients(self, step: Step, index: int) -> bool:
        """Wait for a bucket's gradients, or for all with global clipping; return False if the exchange was closed."""
        latest, missing, last = self._latest, step.submissions.missing, index == len(self._buckets) - 1
        needs_all = self._clipping.needs_all_gradients
        with latest.lock:
            while latest.announced is None and not latest.closed:
                if not (any(missing) if needs_all else missing[index]) and (step.is_awaited or not last):
                    break
                latest.lock.wait()
            return not latest.closed

    def _run_bucket(self, step: Step, index: int) -> None:
        """Exchange a bucket, or the error that this rank has announced."""
        bucket, latest = self._buckets[index], self._latest
        announced = latest.announced if self._nodes is None else self._add_up(step, index, self._nodes)
        if announced is None:
            try:
                self._prepare(step, index)
                self._prepare_following(step, index)
                bucket.run()
                return
            except (RemoteFailure, TransportError):
                raise
            except Exception as error:
                no_message_follows = index == len(self._buckets) - 1 or bucket.plan.reduces
                if bucket.plan.is_out and (isinstance(error, DGCError) or no_message_follows):
                    raise  # the other ranks meet the same error in the messages, or cannot be told in this step
                latest.announce(error)
                if bucket.plan.is_out:
                    return  # the message of the next bucket tells the other ranks
                announced = latest.announced
        else:
            latest.announce(*announced)
        assert announced is not None
        cause, parameter = announced
        try:
            bucket.send_error(cause, parameter)
        except RemoteFailure as failure:
            failure.error.__cause__ = cause
            raise

    def _add_up(self, step: Step, index: int, nodes: NodeSums) -> Announced | None:
        """Add up the gradients of the node's ranks; return an error that one of them has announced."""
        stop = len(self._buckets) if self._clipping.needs_all_gradients else index + 1
        buckets = self._buckets[max(index, self._summed) : stop]
        since = time.perf_counter()
        try:
            if self._latest.announced is None:
                for each in buckets:
                    each.await_gradients()
                    nodes.collect(step, each.bucket)
        except Exception as error:
            self._latest.announce(error)
        announced = nodes.agree(self._latest.announced, step, [each.bucket for each in buckets])
        if announced is None:
            for each in buckets:
                nodes.add_up(step, each.bucket)
        step.stats.lap("exchange", since)
        self._summed = max(self._summed, stop)
        return announced

    def _prepare(self, step: Step, index: int) -> None:
        """Clip a bucket and begin to compress it, unless that was done before. Buckets are prepared in order."""
        if index < self._prepared:
            return
        if self._postponed is not None:
            raise self._postponed
        bucket, needs_all = self._buckets[index], self._clipping.needs_all_gradients
        since = time.perf_counter()
        if index >= self._clipped:
            together = self._buckets if needs_all else [bucket]
            for each in together:
                each.await_gradients()
            self._clipping.fill_in(step, [each.bucket for each in together])
            self._clipped = len(self._buckets) if needs_all else index + 1
        if step.submissions.absent:
            bucket.keep_absent()
        if self._kernels.overlaps:
            bucket.begin()
        step.stats.lap("compress", since)
        self._prepared = index + 1

    def _prepare_following(self, step: Step, index: int) -> None:
        """Prepare the bucket after ``index`` if its gradients have arrived; on a device, also later buckets."""
        if not self._kernels.overlaps or self._nodes is not None:
            return  # with nodes: the ranks of a node may differ in the gradients that have arrived
        stop = index + 1
        while stop < len(self._buckets) and not step.submissions.missing[stop]:
            stop += 1
        try:
            for following in range(index + 1, stop if self._kernels.on_device else min(stop, index + 2)):
                self._prepare(step, following)
        except Exception as error:
            # Raise the error at that bucket's turn, when the other ranks can be told. Do not prepare the bucket again:
            # its gradients would be added to u and v twice.
            self._postponed = error


def quiet() -> np.errstate:
    """Return a context without NumPy's warnings about overflow; the exchange finds overflows and refuses the step."""
    return np.errstate(over="ignore", invalid="ignore")
