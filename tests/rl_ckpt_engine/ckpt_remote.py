"""Processes with one endpoint each, and handles that call them over pipes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rl_ckpt_engine import ReceiverEndpoint, SenderEndpoint, remote
from rl_ckpt_engine.testing import make_weights
from rl_protocol.errors import WeightSyncError

SHAPES = [(1000, 100), (), (0,), (33,)]
PEER = Path(__file__).with_name("ckpt_peer.py")


def loads(*names: str) -> bool:
    """Return whether one of these modules can be imported."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
            return True
    return False


class RemotePeer:
    """Handle of the endpoint in one process, over its pipes."""

    def __init__(self, endpoint: type, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self._handle = remote(endpoint, self)

    def __getattr__(self, operation: str):
        return getattr(self._handle, operation)

    async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        del timeout_s  # the manager's deadline
        self.process.stdin.write(json.dumps([method, payload.hex()]).encode() + b"\n")
        await self.process.stdin.drain()
        line = await self.process.stdout.readline()
        if not line:
            raise ConnectionResetError(f"process {self.name} is gone")
        answer = json.loads(line)
        if "error" in answer:
            raise WeightSyncError(answer["error"])
        return bytes.fromhex(answer["ok"])

    async def has(self, version: int) -> bool:
        want = {w.name: w.data.tobytes().hex() for w in make_weights(SHAPES, seed=version)}
        return await self.loaded() == [version, want]

    async def loaded(self) -> list[Any]:
        """The version of the receiver's weights, and the bytes of each."""
        return json.loads(await self.call("loaded", b"", timeout_s=0.0))

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def started(role: str, name: str, engine: str = "shm", directory: object = "") -> AsyncIterator[RemotePeer]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PEER),
        role,
        name,
        engine,
        str(directory),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )
    try:
        yield RemotePeer(SenderEndpoint if role == "sender" else ReceiverEndpoint, name, process)
    finally:
        process.stdin.close()
        if process.returncode is None:
            process.kill()
        await process.wait()
