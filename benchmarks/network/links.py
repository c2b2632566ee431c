"""The switch and its cables: a bridge, one veth pair a host, and a token bucket at both ends of each.

A host's own end limits what it sends, the switch's end what it receives, as a cable of that speed does. Many senders to
one host so share that host's link, and wait in the queue of the switch's port.
"""

from __future__ import annotations

import re
from pathlib import Path

from network.host import DEVICE, Host
from network.requirements import LabError, program

UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
FRAME = 1514


def bits_per_second(text: str) -> int | None:
    """Read "1gbit", "100mbit"; None for "none", a link without a limit.

    Raises:
        LabError: it is no rate.
    """
    if text == "none":
        return None
    read = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
    if read is None or not float(read[1]):
        raise LabError(f"{text!r} is no rate; write for example 1gbit, 100mbit or none")
    return int(float(read[1]) * UNITS[read[2]])


def bucket(rate: int) -> tuple[int, int, int]:
    """Burst, queue and largest packet, in bytes, of a token bucket of ``rate`` bits a second.

    The burst passes at the speed of memory, so it must be small beside a message: a quarter of a millisecond's worth.
    It must hold a packet, and a packet before it is cut into frames may be 64 kB; packets half the burst's size need
    no cutting, which would cost more than a core at 10 Gbit/s.
    """
    burst = max(rate // 8 // 4000, 2 * FRAME)
    return burst, max(rate // 8 // 50, 256_000), min(max(burst // 2, FRAME), 65_536)


def shape(host: Host, device: str, rate: int | None) -> None:
    """Limit what ``device`` of ``host`` sends to ``rate`` bits a second; None takes the limit away."""
    if rate is None:
        lines = f"qdisc replace dev {device} root pfifo_fast\n"
        largest = 65_536
    else:
        burst, queue, largest = bucket(rate)
        lines = f"qdisc replace dev {device} root tbf rate {rate}bit burst {burst}b limit {queue}b\n"
    host.call([program("tc"), "-batch", "-"], lines)
    host.call([program("ip"), "link", "set", "dev", device, "gso_max_size", str(largest)])


def make_switch(head: Host) -> None:
    """The bridge, which is the head's own interface at the same time: it is not limited."""
    lines = [
        "link set lo up",
        f"link add {DEVICE} type bridge forward_delay 0 stp_state 0",
        f"addr add {head.address}/24 dev {DEVICE}",
        f"link set {DEVICE} up",
    ]
    head.call([program("ip"), "-batch", "-"], "\n".join(lines) + "\n")


def plug_in(head: Host, host: Host, rate: int | None) -> None:
    """A cable from the switch's port, named as the host is, to the host."""
    head.call(
        [program("ip"), "-batch", "-"],
        f"link add {host.name} type veth peer name {DEVICE} netns {host.pid}\n"
        f"link set {host.name} master {DEVICE} up\n",
    )
    host.call(
        [program("ip"), "-batch", "-"],
        f"link set lo up\naddr add {host.address}/24 dev {DEVICE}\nlink set {DEVICE} up\n",
    )
    # The machine may use a control of its own; all labs use the one that kernels are built with.
    host.call(["sh", "-c", "echo cubic > /proc/sys/net/ipv4/tcp_congestion_control || true"])
    limit(head, host, rate)


def limit(head: Host, host: Host, rate: int | None) -> None:
    """The speed of a host's cable, both ways."""
    shape(host, DEVICE, rate)
    shape(head, host.name, rate)


def set_link(head: Host, host: Host, up: bool) -> None:
    """Pull a host's cable out of the switch, or plug it in again."""
    head.call([program("ip"), "link", "set", "dev", host.name, "up" if up else "down"])


def counters(host: Host) -> dict[str, dict[str, int]]:
    """Bytes and packets of each interface of a host: ``{"eth0": {"sent": ..., "received": ..., ...}}``."""
    return read_counters(host.call(["cat", "/proc/net/dev"]))


def own_counters() -> dict[str, dict[str, int]]:
    """The same of the host that this process runs on."""
    return read_counters(Path("/proc/self/net/dev").read_text())


def read_counters(text: str) -> dict[str, dict[str, int]]:
    """Read /proc/net/dev.

    Bytes are those of Ethernet frames, but a packet of up to 64 kB that a network card would cut into frames counts its
    headers once: real frames have up to 4 % more.
    """
    found = {}
    for line in text.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        n = [int(number) for number in numbers.split()]
        found[name.strip()] = {"sent": n[8], "received": n[0], "packets_sent": n[9], "packets_received": n[1]}
    return found
