"""How a rank should wait for the others, and what an exact allreduce costs: ``mpirun -np 2 --bind-to none python ...``.

Two questions behind ``dgc/transport/mpi.py``, each answered for every way to wait:

- ``alone``: microseconds of a collective when all ranks call it at once and have nothing else to do.
- ``beside compute``: each rank on one core, a compute thread beside the thread that communicates, every other message
  20 ms late. How much of its speed does the compute thread keep, and how long does the late rank wait?

``--json`` prints one machine-readable line instead of the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from dgc.transport.mpi import MPITransport

COMM = MPI.COMM_WORLD
MESSAGE_BYTES = (64, 25_000, 1_000_000, 16_000_000)
ARRAY_LENGTHS = (256, 25_000, 6_400_000)
LATE_SECONDS = 0.02
ROUNDS = 40

Gather = Callable[[np.ndarray, np.ndarray], None]
Reduce = Callable[[np.ndarray], None]


def poll(request: MPI.Request) -> None:
    """Test without pause until ``request`` is done."""
    while not request.Test():
        pass


def poll_sleeping(request: MPI.Request) -> None:
    """Test, then sleep for a fixed time, until ``request`` is done."""
    while not request.Test():
        time.sleep(500e-6)


def gathers(transport: MPITransport) -> dict[str, Gather]:
    """Every way to gather (m,) uint8 messages into (P, m)."""
    return {
        "blocking Allgather": lambda message, out: COMM.Allgather(message, out),
        "Iallgather, tests without pause": lambda message, out: poll(COMM.Iallgather(message, out)),
        "Iallgather, sleeps of 0.5 ms": lambda message, out: poll_sleeping(COMM.Iallgather(message, out)),
        "MPITransport": transport.allgather,
    }


def reduces(transport: MPITransport) -> dict[str, Reduce]:
    """Every way to sum (n,) float32 in place."""
    return {
        "blocking Allreduce": lambda array: COMM.Allreduce(MPI.IN_PLACE, array),
        "Iallreduce, tests without pause": lambda array: poll(COMM.Iallreduce(MPI.IN_PLACE, array)),
        "MPITransport": transport.allreduce,
    }


def microseconds(call: Callable[[], None], repeats: int) -> float:
    """Return the median time of a collective that all ranks enter together, after two that do not count."""
    times = []
    for _ in range(repeats + 2):
        COMM.Barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times[2:])


def alone(transport: MPITransport) -> list[dict[str, Any]]:
    """Measure all collectives without any other work."""
    rows = []
    for size in MESSAGE_BYTES:
        message, out = np.zeros(size, np.uint8), np.zeros((COMM.size, size), np.uint8)
        for name, gather in gathers(transport).items():
            time_us = microseconds(partial(gather, message, out), 100 if size < 10**6 else 7)
            rows.append({"collective": "allgather", "bytes": size, "method": name, "us": time_us})
    for length in ARRAY_LENGTHS:
        array = np.zeros(length, np.float32)
        for name, reduce in reduces(transport).items():
            time_us = microseconds(partial(reduce, array), 100 if length < 10**6 else 7)
            rows.append({"collective": "allreduce", "bytes": 4 * length, "method": name, "us": time_us})
    return rows


def multiply() -> None:
    """A slice of work that releases the GIL, like a framework's kernels."""
    _ = MATRIX @ MATRIX


def count() -> None:
    """A slice of work that holds the GIL."""
    sum(range(3000))


MATRIX = np.ones((200, 200), np.float32)
WORK = {"kernels (GIL released)": multiply, "pure Python (GIL held)": count}


class ComputeThread:
    """Repeats a slice of work until stopped; use as a context, then read ``speed``."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._stop = threading.Event()
        self._slices = 0
        self._thread = threading.Thread(target=self._run)
        self.speed = 0.0

    def _run(self) -> None:
        while not self._stop.is_set():
            self._work()
            self._slices += 1

    def __enter__(self) -> ComputeThread:
        self._start = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._start
        self.speed = self._slices / seconds
        self._stop.set()
        self._thread.join()


def beside_compute(transport: MPITransport) -> list[dict[str, Any]]:
    """Measure an allgather of 25 kB while a compute thread shares the rank's only core."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[COMM.rank % len(os.sched_getaffinity(0))]})
    rows = []
    message, out = np.zeros(25_000, np.uint8), np.zeros((COMM.size, 25_000), np.uint8)
    for work_name, work in WORK.items():
        for name, gather in gathers(transport).items():
            # Measured again for each way to wait: the machine may have become busier meanwhile.
            COMM.Barrier()
            with ComputeThread(work) as undisturbed:
                time.sleep(0.3)
            waits = []
            COMM.Barrier()
            with ComputeThread(work) as disturbed:
                for turn in range(ROUNDS):
                    late = turn % COMM.size == COMM.rank
                    if late:
                        time.sleep(LATE_SECONDS)
                    start = time.perf_counter()
                    gather(message, out)
                    if late:
                        waits.append(time.perf_counter() - start)
            rows.append(
                {
                    "compute": work_name,
                    "method": name,
                    "speed_kept": disturbed.speed / undisturbed.speed,
                    "late_rank_ms": 1e3 * statistics.median(waits),
                }
            )
    return rows


def average_over_ranks(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """Replace what each rank measured by the mean over all ranks."""
    for row in rows:
        for key in keys:
            row[key] = COMM.allreduce(row[key]) / COMM.size
    return rows


def main() -> None:
    """Measure, and let rank 0 print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    transport = MPITransport()
    idle = average_over_ranks(alone(transport), ("us",))
    busy = average_over_ranks(beside_compute(transport), ("speed_kept", "late_rank_ms"))
    transport.close()
    if COMM.rank != 0:
        return
    machine = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "ranks": COMM.size,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "mpi": MPI.Get_library_version().split(",")[0],
    }
    if arguments.json:
        print(json.dumps({"machine": machine, "alone": idle, "beside_compute": busy}))
        return
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print("\nalone" + " " * 57 + "us")
    for row in idle:
        print(f"{row['collective']:9} {row['bytes']:>10} bytes  {row['method']:32} {row['us']:9.0f}")
    print("\nbeside compute" + " " * 43 + "speed kept   late rank")
    for row in busy:
        kept, wait = row["speed_kept"], row["late_rank_ms"]
        print(f"{row['compute']:24} {row['method']:32} {kept:9.0%} {wait:8.2f} ms")


if __name__ == "__main__":
    main()
