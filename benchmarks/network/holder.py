"""The first process of a host: gives it its name, its /etc/hosts and memory of its own, then does nothing.

    holder.py NAME FOLDER

It is process 1 of the host's own process namespace, so when it is killed the kernel kills every process of the host.
"""

import signal
import socket
import subprocess
import sys
from pathlib import Path

name, folder = sys.argv[1:]
socket.sethostname(name)
mounts = [
    ["--bind", f"{folder}/hosts", "/etc/hosts"],
    ["-t", "tmpfs", "dgc-lab", "/dev/shm"],
    # The ssh daemon wants a folder in /run, and no host shall leave anything in the machine's.
    ["-t", "tmpfs", "dgc-lab", "/run"],
]
for arguments in mounts:
    subprocess.run(["mount", *arguments], check=True)
Path("/run/sshd").mkdir(mode=0o755)
# Orphans of the host become this process's children; ignored, they leave no zombies behind.
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
while True:
    signal.pause()
