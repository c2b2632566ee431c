"""What goes wrong in the matrix of chaos: each fault, and what a user should be told of it."""

from __future__ import annotations

from dataclasses import dataclass, field

STEP = 5
"""The step in which something happens, counted from 0."""
STEPS = 30
"""Steps of a job that comes to its end."""
VICTIM = 1
"""The rank to which it happens."""
TEXT = "chaos: this rank fails"

STALL = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20"}
"""Where a rank never comes: 20 seconds instead of ten minutes."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong on one rank, or from outside.

    Attributes:
        name: on the command line.
        what: in the table.
        where: "begin" (of a step), "forward", "backward" or "update" on one rank; "start", before its model is wrapped;
            "length", a number of steps of its own; "outside", from the process that started the job; "end", after each
            step; "" for nothing.
        wanted: "goes on" to the same parameters as without the fault, "saves" a checkpoint on all ranks and ends with
            status 0, or "ends" with another status.
        tells: a line of the output must match this pattern for the end to be clear; any does where the user knows.
        environment: of the job.
    """

    name: str
    what: str
    where: str
    wanted: str = "ends"
    tells: str = TEXT
    environment: dict[str, str] = field(default_factory=dict)


_UNEVEN = r"same number of steps|one of the ranks finished execution|rank 1 (has )?ended|has (been )?shut ?down"
_MEMORY = (
    r"(?i)memory ?error|allocate|out of memory|bad_alloc|RESOURCE_EXHAUSTED|OOM|can't start new thread"
    r"|failed to map segment"
)
_KILLED = r"(?i)signal 9|killed|SIGKILL|status code -9|code:? 137|code -9"

FAULTS = {
    fault.name: fault
    for fault in (
        Fault("none", "nothing (for comparison)", "", "goes on"),
        Fault("kill", "`kill -9` of a rank", "begin", tells=_KILLED),
        Fault("stop", "a rank is stopped (SIGSTOP) for {stop:.0f} s", "begin", "goes on"),
        Fault(
            "stop_forever", "a rank is stopped for good", "begin", tells=r"rank 1\b|ranks?:? ?\[?1\b", environment=STALL
        ),
        Fault("raise_forward", "a rank raises in its forward pass", "forward"),
        Fault("raise_backward", "a rank raises in a hook, within the backward pass", "backward"),
        Fault("raise_update", "a rank raises in `optimizer.step()`", "update"),
        Fault("exit_0", "`sys.exit(0)` of a rank between steps", "begin", tells=_UNEVEN),
        Fault(
            "exit_3", "`sys.exit(3)` of a rank between steps", "begin", tells=_UNEVEN + r"|exit code: 3|code 3|status 3"
        ),
        Fault("one_more", "a rank makes one step more", "length", tells=_UNEVEN),
        Fault("one_fewer", "a rank makes one step fewer", "length", tells=_UNEVEN),
        Fault("interrupt_launcher", "Ctrl-C (SIGINT) to the launcher", "outside", tells=""),
        Fault("interrupt_all", "Ctrl-C to the launcher and all ranks", "outside", tells=""),
        Fault("save_agreed", "SIGTERM to all ranks; they agree on a step, save and end", "outside", "saves"),
        Fault(
            "save_alone",
            "SIGTERM to one rank, which saves while the other trains on",
            "outside",
            tells=r"(?i)checkpoint|different sizes|another (kind of )?message|rank 1\b|shut ?down|stall",
            environment=STALL,
        ),
        Fault("memory_error", "a rank's address space ends, and its forward pass allocates", "forward", tells=_MEMORY),
        Fault("memory_start", "the same before its model is wrapped", "start", tells=_MEMORY),
        Fault("fork", "a rank forks a child that ends by `sys.exit`", "begin", "goes on"),
    )
}
