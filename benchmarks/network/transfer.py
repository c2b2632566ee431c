"""One TCP connection between two hosts, as fast as it goes: ``receive ADDRESS`` or ``send ADDRESS SECONDS``."""

import socket
import sys
import time

PORT = 5001
CHUNK = bytes(1 << 16)


def receive(address: str) -> None:
    """Print "ready", then the bits a second of the connection that comes, without its first tenth."""
    with socket.create_server((address, PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
    buffer = bytearray(1 << 20)
    arrivals = [(time.perf_counter(), 0)]
    while got := connection.recv_into(buffer):
        arrivals.append((time.perf_counter(), arrivals[-1][1] + got))
    (end, total) = arrivals[-1]
    begin = arrivals[0][0] + (end - arrivals[0][0]) / 10
    then, before = next(arrival for arrival in arrivals if arrival[0] >= begin)
    print(8 * (total - before) / (end - then))


def send(address: str, seconds: float) -> None:
    """Send for a while."""
    with socket.create_connection((address, PORT)) as connection:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.sendall(CHUNK)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        send(sys.argv[2], float(sys.argv[3]))
