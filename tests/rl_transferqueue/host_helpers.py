"""Storage units and clients of other hosts: processes with another mark in RL_HOST."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Generator
from contextlib import contextmanager

import msgspec

from rl_transferqueue import PlaneDescriptor, TransferQueueConfig
from rl_transferqueue.wire.descriptor import UnitAddress

UNITS = """
import sys
import msgspec
from rl_transferqueue import TransferQueueConfig, start_host_units

config = msgspec.json.decode(sys.argv[1], type=TransferQueueConfig)
with start_host_units(config) as units:
    print(msgspec.json.encode([units.addresses, units.pids]).decode(), flush=True)
    sys.stdin.read()
"""

CLIENT = """
import asyncio, sys
import numpy as np
from rl_protocol import BatchData, dense, ragged
from rl_transferqueue import PlaneDescriptor, connect

descriptor = PlaneDescriptor.from_json(sys.argv[1])

def say(*what):
    print(*what, flush=True)

def rows(first, count, width=1 << 12):
    return BatchData({"x": dense(np.arange(first, first + count, dtype=np.int64)[:, None] * np.ones(width, np.int64))})

async def main():
    async with await connect(descriptor) as client:
{body}

asyncio.run(main())
"""


@contextmanager
def host_units(mark: str, config: TransferQueueConfig) -> Generator[tuple[list[UnitAddress], list[int]]]:
    """Units on the host of that mark: their addresses and process ids."""
    words = [sys.executable, "-c", UNITS, json.dumps(msgspec.to_builtins(config))]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=marked(mark))
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield msgspec.json.decode(process.stdout.readline(), type=tuple[list[UnitAddress], list[int]])
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def start_client(mark: str, descriptor: PlaneDescriptor, body: str) -> subprocess.Popen[str]:
    """A process on the host of that mark that runs `body` with `client`, `rows` and `say`."""
    program = CLIENT.replace("{body}", textwrap.indent(textwrap.dedent(body), " " * 8))
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program, descriptor.to_json()],
        env=marked(mark),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def on_host(mark: str, descriptor: PlaneDescriptor, body: str) -> str:
    """What such a process prints."""
    process = start_client(mark, descriptor, body)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def marked(mark: str) -> dict[str, str]:
    return {**os.environ, "RL_HOST": mark}
