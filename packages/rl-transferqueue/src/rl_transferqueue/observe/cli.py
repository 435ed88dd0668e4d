"""The command `rl-tq`: inspect a running plane.

rl-tq status                       this user's only plane on this host
rl-tq status --descriptor PATH     a named plane; RL_TQ_DESCRIPTOR does the same
rl-tq status --every 2             repeatedly, with rates
rl-tq status --json                for programs
rl-tq metrics --port 9400          serve the same numbers to Prometheus, on 127.0.0.1
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rl_protocol.errors import ConfigError, RLError
from rl_transferqueue.client.client import Client, connect
from rl_transferqueue.launch.find_plane import find_plane
from rl_transferqueue.observe.status import Status, describe
from rl_transferqueue.wire.descriptor import PlaneDescriptor

_LOOK_S = 5.0
"""Deadline for the plane's answers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, 1 if the plane does not answer, 2 if there is none, or 141 if
    nobody reads the output any more.
    """
    options = _parser().parse_args(arguments)
    try:
        descriptor = find_plane(options.descriptor)
        if options.command == "metrics":
            _serve_metrics(descriptor, options.port)
        else:
            asyncio.run(_status(descriptor, every_s=options.every, as_json=options.json))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except RLError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except BrokenPipeError:  # the reader of a pipe has ended, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
        return 141
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rl-tq", description="Inspect a running data plane.")
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", help="print rows, memory, clients and requests")
    metrics = commands.add_parser("metrics", help="serve Prometheus metrics on 127.0.0.1 until interrupted")
    for command in (status, metrics):
        command.add_argument("--descriptor", type=Path, metavar="PATH", help="file with the plane's descriptor")
    status.add_argument("--every", type=_seconds, metavar="SECONDS", help="repeat after this many seconds")
    status.add_argument("--json", action="store_true", help="print one line of JSON each time")
    metrics.add_argument("--port", type=int, default=9400, help="port (default 9400; 0: any free port)")
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds; got {text}")
    return seconds


async def _status(descriptor: PlaneDescriptor, *, every_s: float | None, as_json: bool) -> None:
    async with await connect(descriptor) as client:
        before, seen = None, 0.0
        while True:
            now, moment = await look(client, descriptor), time.monotonic()
            text = now.to_json() if as_json else describe(now, before, moment - seen if before else 0)
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
            if every_s is None:
                return
            before, seen = now, moment
            await asyncio.sleep(every_s)
            if not as_json:
                sys.stdout.write("\n")


async def look(client: Client, descriptor: PlaneDescriptor) -> Status:
    """The state of the plane now."""
    stats, metrics = await asyncio.gather(client.stats(timeout_s=_LOOK_S), client.metrics(timeout_s=_LOOK_S))
    return Status(
        controller_pid=descriptor.controller.process.pid,
        storage_units=len(descriptor.units),
        stats=stats,
        metrics=metrics,
    )


def _serve_metrics(descriptor: PlaneDescriptor, port: int) -> None:
    try:
        from rl_transferqueue.observe.prometheus import serve_metrics
    except ModuleNotFoundError as error:
        raise ConfigError(f"rl-tq metrics needs an extra: {error}.") from error
    with serve_metrics(descriptor, port=port) as server, contextlib.suppress(KeyboardInterrupt):
        sys.stdout.write(f"serving {server.url}\n")
        sys.stdout.flush()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
