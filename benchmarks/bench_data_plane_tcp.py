"""Measure put and get over TCP against memcpy, bare sockets and TransferQueue 0.1.11.

    uv run --group bench benchmarks/bench_data_plane_tcp.py [--pairs 9] [--smoke]

Shared memory is off: our units listen at 127.0.0.2 and the client comes from 127.0.0.1. All planes
live at the same time and take turns (harness/pairs.py); each has one client, in this process. The
payload is 1024 rows x 9 columns of 8192 float32. `bare sockets` moves the same columns to another
process by sendmsg and recv_into a warm buffer and waits for one byte: the cost of TCP itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from bench_data_plane import WIDTH, Ours, Payload, Peer, memcpy
from harness.pairs import Subject, against, paired, publish, summary, take_turns, verdict
from peers.transferqueue import peer_planes

from rl_transferqueue import TransferQueueConfig, connect, start_local_plane

_spawn = multiprocessing.get_context("spawn")


def drain(port: int, nbytes: int) -> None:
    """Receive `nbytes` bytes into one buffer repeatedly; answer each time with one byte."""
    with socket.create_connection(("127.0.0.2", port)) as peer:
        memory = memoryview(np.ones(nbytes, np.uint8))
        while True:
            left = memory
            while left:
                got = peer.recv_into(left[: 256 << 10])
                if not got:
                    return
                left = left[got:]
            peer.sendall(b"k")


@contextlib.contextmanager
def bare_sockets(payload: Payload) -> Iterator[Subject]:
    """Send the columns to another process, without a data plane."""
    with socket.create_server(("127.0.0.2", 0)) as server:
        process = _spawn.Process(target=drain, args=(server.getsockname()[1], payload.nbytes), daemon=True)
        process.start()
        peer = server.accept()[0]
    with peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        columns = [memoryview(values).cast("B") for values in payload.dense.values()]

        def send() -> None:
            for column in columns:
                peer.sendall(column)
            peer.recv(1)

        yield Subject("bare sockets", send, [os.getpid(), process.pid or 0])
    process.join(10)


def compare(ours: Ours, peers: list[Peer], pairs: int) -> list[dict[str, Any]]:
    """Put and get."""
    me, nbytes, names = os.getpid(), ours.payload.nbytes, [peer.name for peer in peers]
    rows: list[dict[str, Any]] = []
    with bare_sockets(ours.payload) as bare:
        subjects = [
            Subject("ours", ours.put, [me, *ours.pids], ours.clear),
            *(Subject(peer.name, peer.put, [me, *peer.pids], peer.clear) for peer in peers),
            Subject("memcpy", memcpy(ours.payload), [me]),
            bare,
        ]
        timings = take_turns(subjects, pairs)
        figures = summary(timings, nbytes)
        rows.append(against("TCP put", timings, names, 1, 3, figures=figures))
        for to, must, aim in (("memcpy", 4, 2.5), ("bare sockets", 1.5, 1.2)):
            wall, cpu = paired(timings, "ours", to), paired(timings, "ours", to, "cpu")
            what = f"TCP put, time against {to}"
            rows.append(verdict(what, wall["median"], must, aim, at_least=False, wall=wall, cpu=cpu))
        for side in (ours, *peers):
            side.put()
        subjects = [
            Subject("ours", ours.get, [me, *ours.pids], lambda: setattr(ours, "last", None)),
            *(Subject(peer.name, peer.get, [me, *peer.pids]) for peer in peers),
            Subject("memcpy", memcpy(ours.payload), [me]),
            bare,
        ]
        timings = take_turns(subjects, pairs)
        rows.append(against("TCP get, every page touched", timings, names, 4, 7, figures=summary(timings, nbytes)))
        wall, cpu = paired(timings, "ours", "bare sockets"), paired(timings, "ours", "bare sockets", "cpu")
        what = "TCP get, time against bare sockets"
        rows.append(verdict(what, wall["median"], 1.5, 1.2, at_least=False, wall=wall, cpu=cpu))
    got = ours.run(ours.client.get(ours.meta))
    assert all((got.dense(name).values == values).all() for name, values in ours.payload.dense.items())
    return rows


def main() -> None:
    """Compare, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--smoke", action="store_true", help="an eighth of the bytes, 1 pair, nothing written")
    arguments = parser.parse_args()
    pairs, width, units = (1, WIDTH // 8, (1,)) if arguments.smoke else (arguments.pairs, WIDTH, (1, 2))
    torch.set_num_threads(1)
    config = TransferQueueConfig(capacity_mb=1400, num_storage_units=2, listen="127.0.0.2", shared_memory=False)
    with contextlib.ExitStack() as stack:
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        plane = stack.enter_context(start_local_plane(config))
        client = loop.run_until_complete(connect(plane.descriptor))
        stack.callback(lambda: loop.run_until_complete(client.close()))
        peers = stack.enter_context(peer_planes(*units))
        payload = Payload("dense", width)
        ours = Ours(loop, client, list(plane.pids), payload)
        sides = [Peer(peer, payload) for peer in peers]
        rows = compare(ours, sides, pairs)
        for side in sides:
            side.client.close()
    if not arguments.smoke:
        publish("transport", rows)


if __name__ == "__main__":
    main()
