"""Run as every rank of a 2 x 2 cluster: exchanges bytes with a neighbour and with the other node, tells what it saw.

    link_probe.py FOLDER INTRA_BYTES INTER_BYTES ROUNDS    writes FOLDER/RANK.json

No torch: the start costs nothing, and every byte on the wire is known.
"""

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from tools.cluster.counters import own_traffic

PORT = 7000


def connect(address: str) -> socket.socket:
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection((address, PORT))
        time.sleep(0.01)


def receive(link: socket.socket, count: int) -> None:
    buffer = bytearray(1 << 16)
    while count:
        count -= link.recv_into(buffer, min(count, len(buffer)))


def exchange(link: socket.socket, count: int) -> tuple[float, float]:
    """Both ways at once; when it began and ended here. On return nothing is under way any more."""
    link.sendall(b".")
    receive(link, 1)
    began = time.time()
    sender = threading.Thread(target=link.sendall, args=(b"x" * count,))
    sender.start()
    receive(link, count)
    ended = time.time()
    sender.join()
    link.sendall(b".")
    receive(link, 1)
    return began, ended


def reaches(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        try:
            outward.connect((address, 9))  # sends nothing
        except OSError:
            return False
    return True


def main() -> None:
    folder, intra, inter, rounds = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    rank = int(os.environ["RANK"])
    server = socket.create_server(("", PORT), backlog=8)
    links = {}
    for peer in (rank ^ 1, rank ^ 2):
        if rank < peer:
            links[peer] = connect(f"10.77.{peer // 2}.{peer % 2 + 1}")
            links[peer].sendall(bytes([rank]))
    while len(links) < 2:
        link, _ = server.accept()
        links[link.recv(1)[0]] = link
    before = own_traffic()
    assert before is not None
    spans = [[exchange(links[rank ^ 1], intra), exchange(links[rank ^ 2], inter)] for _ in range(rounds)]
    after = own_traffic()
    assert after is not None
    names, numbers = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    retransmitted = dict(zip(names, numbers, strict=True))["RetransSegs"]
    seen = {
        "environment": {name: value for name, value in os.environ.items() if name.isupper()},
        "address": links[rank ^ 2].getsockname()[0],
        "peers": {peer: link.getpeername()[0] for peer, link in links.items()},
        "reaches": {"loopback": reaches("127.0.0.1"), "outside": reaches("192.0.2.1")},
        "spans": spans,
        "traffic": asdict(after - before),
        "sent_twice": int(retransmitted),
    }
    (folder / f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
