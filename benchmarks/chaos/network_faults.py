"""What goes wrong with the network or a host between two ranks, and when they begin at different times."""

from __future__ import annotations

from faults import STALL, TEXT, Fault

RATE = "1gbit"
SLOW = "10mbit"
GAP = 30.0
"""Seconds by which a rank is late."""
CUT = 5.0

_RANK = r"StallError: rank 0 gives up|host2|10\.77\.0\.2"
KEEPALIVE = {
    # A rank's warning that its daemon cannot send on would put keepalive off on the host that was cut off.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "18",
    "OMPI_MCA_oob_tcp_keepalive_time": "5",
    "OMPI_MCA_oob_tcp_keepalive_intvl": "3",
    "OMPI_MCA_oob_tcp_keepalive_probes": "3",
}
"""Open MPI's daemons ask each other after 5 s of silence, and give up after three answers that do not come: 14 s."""

NETWORK_FAULTS = {
    fault.name: fault
    for fault in (
        Fault("none", "nothing (for comparison)", "", "goes on"),
        Fault("link_short", f"a host's link is down for {CUT:.0f} s", "network", "goes on"),
        Fault("link_down", "it is down for good", "network", tells=_RANK, environment=STALL),
        Fault(
            "link_down_keepalive",
            "it is down for good, with `oob_tcp_keepalive_*`",
            "network",
            tells=_RANK,
            environment={**STALL, **KEEPALIVE},
        ),
        Fault("slow", f"it drops from {RATE} to {SLOW}", "network", "goes on"),
        Fault("kill_host", "a host dies (power failure)", "network", tells=_RANK, environment=STALL),
        Fault(
            "kill_host_keepalive",
            "a host dies, with `oob_tcp_keepalive_*`",
            "network",
            tells=_RANK,
            environment={**STALL, **KEEPALIVE},
        ),
        Fault("late_init", f"a rank comes to `hvd.init()` {GAP:.0f} s late", "init", "goes on"),
        Fault("late_step", f"a rank comes to its first step {GAP:.0f} s late", "start", "goes on"),
        Fault("raise_forward", "a rank raises in its forward pass", "forward", tells=TEXT),
    )
}
