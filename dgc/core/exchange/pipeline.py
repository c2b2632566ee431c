"""The communication thread of an exchange: buckets run on it in a fixed order, each when its gradients are in.

Every rank issues the same collectives in the same order, whatever order its gradients arrive in. Where the kernels have
several threads, those but one would have nothing to do while this one encodes a bucket, waits for the network and
applies what came. So the bucket after it is begun first, if its gradients are in. A device is given all buckets whose
gradients are in before it is waited for.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

from dgc.core.exchange.bucket import BucketExchange
from dgc.core.exchange.gradients.clipping import Clipping
from dgc.core.exchange.gradients.nodes import Announced, NodeSums
from dgc.core.exchange.records import StepContext
from dgc.core.exchange.step import Event, Stage, Step
from dgc.core.kernels.base import Kernels
from dgc.core.message import RemoteFailure
from dgc.core.transport import Transport
from dgc.errors import DGCError, RemoteError, StallError, TransportError

_CLOSE_PATIENCE = 5.0
"""Seconds that closing waits for a collective under way; a rank that is gone would be waited for for ever."""


_STALL_PATIENCE = 10.0
"""Seconds in which the caller takes the error about a missing rank. It may wait for that rank, too, where nothing ends
the wait: in Horovod's collective of a placeholder."""


class Pipeline:
    """Runs all buckets of each step; the thread starts with the first one."""

    def __init__(
        self,
        buckets: Sequence[BucketExchange],
        clipping: Clipping,
        kernels: Kernels,
        step: Step,
        transport: Transport,
        nodes: NodeSums | None = None,
    ) -> None:
        """Take the parts of an exchange: ``buckets`` in their order, and ``nodes`` where several ranks send as one."""
        self._transport = transport
        self._nodes = nodes
        self._buckets = buckets
        self._clipping = clipping
        self._kernels = kernels
        self._step = step
        self._prepared = self._clipped = self._summed = 0  # buckets before these are
        self._waits = kernels.on_device  # whether kernels run while this thread goes on
        self._thread: threading.Thread | None = None

    def start(self, context: StepContext) -> None:
        """Begin a step, whose gradients arrive from now on. The caller holds the lock."""
        self._prepared = self._clipped = self._summed = 0
        self._step.begin(context)
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="dgc-exchange", daemon=True)
            self._thread.start()

    def close(self) -> bool:
        """End the thread.

        Returns:
            False if it still waits for another rank inside the transport, or runs in the process that this one was
            forked from: the transport must then not be closed.
        """
        if self._step.in_child:
            return False
        self._step.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_PATIENCE)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    # -- inside: the communication thread --------------------------------------------------------------------------

    def _loop(self) -> None:
        step = self._step
        self._kernels.adopt_thread()
        while True:
            with step.lock:
                while step.stage is not Stage.OPEN and not step.closed:
                    step.lock.wait()
                if step.closed:
                    if step.stage is Stage.OPEN:
                        step.broke(TransportError("this compressor was closed in the middle of a step"))
                    return
            try:
                done = self._run_step()
            except RemoteFailure as failure:
                step.broke(failure.error)
            except StallError as error:
                step.broke(error)
                if not step.wait_until_raised(_STALL_PATIENCE):
                    self._transport.end_job(error)
            except DGCError as error:
                step.broke(error)
            except BaseException as error:
                wrapped = RemoteError(f"the exchange failed: {type(error).__name__}: {error}")
                wrapped.__cause__ = error
                step.broke(wrapped)
            else:
                if done:
                    step.enter(Event.RUN)

    def _run_step(self) -> bool:
        """Run all buckets; returns False if the exchange was closed before that."""
        context = self._step.context
        assert context is not None, "a step has begun"
        self._step.capture()
        if (refused := context.await_scale()) is not None:
            self._step.announce(refused)
        try:
            for index in range(len(self._buckets)):
                if not self._wait_for_gradients(context, index):
                    return False
                self._run_bucket(context, index)
        finally:
            for bucket in self._buckets:
                bucket.encoder.abandon()
        return True

    def _wait_for_gradients(self, context: StepContext, index: int) -> bool:
        """Wait for a bucket's gradients, with global clipping for those of all; returns False if closed."""
        step, missing, last = self._step, context.submissions.missing, index == len(self._buckets) - 1
        whole = self._clipping.needs_all_gradients

        def ready() -> bool:
            return not (any(missing) if whole else missing[index]) and (context.is_awaited or not last)

        with step.lock:
            while not (ready() or step.announced is not None or step.closed):
                step.lock.wait()
            return not step.closed

    def _run_bucket(self, context: StepContext, index: int) -> None:
        """Exchange a bucket, or the error that this rank has announced.

        Raises:
            RemoteFailure: a rank sent an error.
            DGCError: a message or a collective failed; or another error that cannot be reported in this step any more.
        """
        bucket, step = self._buckets[index], self._step
        announced = step.announced if self._nodes is None else self._add_up(context, index, self._nodes)
        if announced is None:
            try:
                self._prepare(context, index)
                self._prepare_following(context, index)
                bucket.run()
                return
            except (RemoteFailure, TransportError):
                raise
            except Exception as error:
                if bucket.at.is_out and (isinstance(error, DGCError) or self._sends_no_more(index)):
                    raise  # the others see it in the messages as well, or cannot hear of it in this step
                step.announce(_told(error))
                if bucket.at.is_out:
                    return  # the message of the next bucket tells the others
                announced = step.announced
        else:
            step.announce(*announced)
        assert announced is not None
        cause, parameter = announced
        try:
            bucket.send_error(cause, parameter)
        except RemoteFailure as failure:
            failure.error.__cause__ = cause
            raise

    def _sends_no_more(self, index: int) -> bool:
        """Whether no message follows that of the bucket: it is the last, or an allreduce comes first."""
        return index == len(self._buckets) - 1 or self._buckets[index].at.plan.allreduces

    def _add_up(self, context: StepContext, index: int, nodes: NodeSums) -> Announced | None:
        """Where several ranks send as one: add up their gradients, of one bucket or, with global clipping, of all.

        Returns:
            What any of them cannot go on for. It is met by all of them, as they send the same message.
        """
        stop = len(self._buckets) if self._clipping.needs_all_gradients else index + 1
        buckets = self._buckets[max(index, self._summed) : stop]
        since = time.perf_counter()
        try:
            if self._step.announced is None:
                for each in buckets:
                    each.encoder.await_gradients(context)
                    nodes.collect(context, each.bucket)
        except Exception as error:
            self._step.announce(_told(error))
        announced = nodes.agree(self._step.announced, context, [each.bucket for each in buckets])
        if announced is None:
            for each in buckets:
                nodes.add_up(context, each.bucket)
        context.stats.lap("exchange", since)
        self._summed = max(self._summed, stop)
        return announced

    def _prepare(self, context: StepContext, index: int) -> None:
        """Clip a bucket and let others begin with it, unless that has been done; those before it are."""
        if index < self._prepared:
            return
        bucket = self._buckets[index]
        since = time.perf_counter()
        self._clip(context, index)
        bucket.keep_absent()
        if self._kernels.overlaps and bucket.encoder.begins_early:
            bucket.encoder.begin(bucket.at)
        context.stats.lap("compress", since)
        self._prepared = index + 1

    def _clip(self, context: StepContext, index: int) -> None:
        """Fill in the clipping factors of a bucket; on a device, which has to be waited for, of all that are there."""
        if index < self._clipped:
            return
        stop = index + 1
        if self._clipping.needs_all_gradients:
            stop = len(self._buckets)
        elif self._waits and self._nodes is None:
            stop = self._stop(context, index)
        ready = self._buckets[index:stop]
        for each in ready:
            each.encoder.await_gradients(context)
        self._clipping.fill_in(context, [each.bucket for each in ready])
        self._clipped = stop

    def _prepare_following(self, context: StepContext, index: int) -> None:
        """Prepare the bucket after ``index``, if that is any use and its gradients are there; on a device all such."""
        if not self._kernels.overlaps or self._nodes is not None:
            return  # which gradients are there differs between the ranks of a node
        stop = self._stop(context, index)
        # What fails here fails again when it is that bucket's turn, and can be reported to the other ranks then.
        with contextlib.suppress(Exception):
            for following in range(index + 1, stop if self._waits else min(stop, index + 2)):
                self._prepare(context, following)

    def _stop(self, context: StepContext, index: int) -> int:
        """The first bucket from ``index`` on, itself not counted, whose gradients are not all there."""
        stop = index + 1
        while stop < len(self._buckets) and not context.submissions.missing[stop]:
            stop += 1
        return stop


def _told(error: Exception) -> DGCError:
    """What is reported to the other ranks of an error here."""
    if isinstance(error, DGCError):
        return error
    wrapped = RemoteError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
