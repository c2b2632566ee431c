"""Several hosts on one machine, joined by a switch; their links can be measured, slowed and cut."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from network import leftovers, links
from network.host import Host
from network.processes import MARK
from network.requirements import LabError, require, search_path

NETWORK = "10.77.0."
"""Exists within the namespaces only."""
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


class Lab:
    """Hosts host1, host2, ... and a head, from where jobs are started, whose link has no limit.

    Use it as a context. Whatever happens, nothing of it stays: hosts end with the process that made them, also when
    that is killed, and network, addresses and mounts end with the hosts. (The thread that makes a lab must live as
    long.)

    Args:
        hosts: how many, 2 to 16.
        rate: of every host's link, both ways: "1gbit", "100mbit" or bits a second; None: no limit.
        pin: give each host cores of its own, as many as there are for each, and one thread to the numerical libraries
            where that is one core.
        launcher: what will be asked of it: "mpirun", "horovodrun" or "gloo" (``network.launch``).

    Raises:
        LabError: no root, or something is not installed; one line.
    """

    def __init__(
        self, hosts: int = 2, rate: str | int | None = "1gbit", pin: bool = False, launcher: str = "mpirun"
    ) -> None:
        if not 2 <= hosts <= 16:
            raise LabError(f"a lab has 2 to 16 hosts, not {hosts}")
        bits = links.bits_per_second(rate) if isinstance(rate, str) else rate
        require(launcher)
        self.folder = leftovers.make_folder()
        self.hosts: dict[str, Host] = {}
        self.pinned = pin
        self._lock = threading.Lock()
        self._timers: list[threading.Timer] = []
        self._jobs: list[subprocess.Popen[str]] = []
        self._old_handlers: dict[int, Any] = {}
        atexit.register(self.close)
        self._catch_signals()
        try:
            self._build(hosts, bits)
        except BaseException:
            self.close()
            raise

    def _build(self, count: int, rate: int | None) -> None:
        cores = shares(count) if self.pinned else [None] * count
        addresses = {f"host{i + 1}": f"{NETWORK}{i + 1}" for i in range(count)}
        known = {"head": f"{NETWORK}254", **addresses}
        names = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in known.items())]
        (self.folder / "hosts").write_text("\n".join(names) + "\n")
        self.environment = {
            **os.environ,
            MARK: str(self.folder),
            "PATH": search_path(),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "GLOO_SOCKET_IFNAME": links.DEVICE,
        }
        if self.pinned and all(len(share) == 1 for share in cores if share):
            self.environment.update(dict.fromkeys(ONE_THREAD, "1"))
            # What waits by asking again and again takes the only core from what it waits for.
            self.environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        self.head = Host("head", known["head"], self.folder, self.environment, own_processes=False)
        links.make_switch(self.head)
        for (name, address), share in zip(addresses.items(), cores, strict=True):
            self.hosts[name] = Host(name, address, self.folder, self.environment, share)
            links.plug_in(self.head, self.hosts[name], rate)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the lab; its network goes with them."""
        with self._lock:
            atexit.unregister(self.close)
            for timer in self._timers:
                timer.cancel()
            # A launcher would have much to say about hosts that are gone.
            for job in self._jobs:
                job.kill()
            for host in (*self.hosts.values(), *((self.head,) if hasattr(self, "head") else ())):
                host.kill()
            self.hosts.clear()
            leftovers.remove(self.folder)
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
            self._old_handlers.clear()

    def _catch_signals(self) -> None:
        """SIGTERM and SIGHUP end this process through its clean-up, as Ctrl-C does."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                self._old_handlers[number] = signal.signal(number, lambda n, _: sys.exit(128 + n))

    # What runs

    def start(self, host: str, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a process on a host ("head", "host1", ...); options are those of ``subprocess.Popen``."""
        job = self._host(host).start(command, **options)
        if host == "head":
            self._jobs.append(job)
        return job

    def run(self, host: str, command: Sequence[str]) -> str:
        """Run a command on a host; returns what it printed."""
        return self._host(host).call(command)

    # What may go wrong

    def link_down(self, host: str, seconds: float | None = None) -> None:
        """Pull out a host's cable, and plug it in again after ``seconds`` (None: ``link_up`` does). Returns at once."""
        links.set_link(self.head, self._host(host), up=False)
        if seconds is not None:
            timer = threading.Timer(seconds, self.link_up, [host])
            timer.daemon = True
            self._timers.append(timer)
            timer.start()

    def link_up(self, host: str) -> None:
        """Plug it in again."""
        with self._lock:
            if host in self.hosts and self.hosts[host].alive:
                links.set_link(self.head, self.hosts[host], up=True)

    def rate(self, host: str, bits: str | int | None) -> None:
        """Give a host's link another speed, both ways, also while something runs."""
        links.limit(self.head, self._host(host), links.bits_per_second(bits) if isinstance(bits, str) else bits)

    def kill_host(self, host: str) -> None:
        """Power failure: the host is cut off first, so that no other host is told, and all its processes are gone."""
        links.set_link(self.head, self._host(host), up=False)
        self._host(host).kill()

    # What can be measured

    def counters(self, host: str) -> dict[str, dict[str, int]]:
        """``links.counters`` of a host: bytes and packets by interface."""
        return links.counters(self._host(host))

    def measure(self, sender: str = "host1", receiver: str = "host2", seconds: float = 0.5) -> float:
        """Bits of data a second that one TCP connection carries: about 94 % of the link's rate."""
        script = [sys.executable, "-I", str(Path(__file__).with_name("transfer.py"))]
        at = self._host(receiver)
        receiving = at.start([*script, "receive", at.address], stdout=subprocess.PIPE)
        assert receiving.stdout is not None
        receiving.stdout.readline()
        self._host(sender).call([*script, "send", at.address, str(seconds)])
        return float(receiving.communicate(timeout=60)[0])

    def _host(self, name: str) -> Host:
        if name == "head":
            return self.head
        if name not in self.hosts:
            raise LabError(f"there is no host {name!r}; there are head, {', '.join(self.hosts)}")
        return self.hosts[name]


def shares(hosts: int) -> list[list[int] | None]:
    """The cores of each host, where there is at least one for each.

    Raises:
        LabError: there are fewer cores than hosts.
    """
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // hosts
    if not each:
        raise LabError(f"{hosts} hosts cannot have a core each: there are {len(cores)}; leave out --pin")
    return [cores[i * each : (i + 1) * each] for i in range(hosts)]
