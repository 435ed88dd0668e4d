"""Processes with one endpoint each, and handles that reach them over pipes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rl_ckpt_engine import ReceiveAck
from rl_ckpt_engine.testing import make_weights
from rl_protocol.errors import WeightSyncError

SHAPES = [(1000, 100), (), (0,), (33,)]
PEER = Path(__file__).with_name("ckpt_peer.py")


def loads(*names: str) -> bool:
    """Whether one of these modules can be imported."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
            return True
    return False


def shared_memory() -> set[str]:
    """Names of files in shared memory, without semaphores, which other programs have."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}


class RemotePeer:
    """Both handles over the pipes of one process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process

    async def call(self, *request: object) -> object:
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        await self.process.stdin.drain()
        line = await self.process.stdout.readline()
        if not line:
            raise ConnectionResetError(f"process {self.name} is gone")
        answer = json.loads(line)
        if "error" in answer:
            raise WeightSyncError(answer["error"])
        return answer["ok"]

    async def send(self, version: int, timeout_s: float) -> bytes:
        return bytes.fromhex(await self.call("send", version))

    async def finalize(self, version: int) -> None:
        await self.call("finalize", version)

    async def abort(self) -> None:
        await self.call("abort")

    async def pause(self, timeout_s: float) -> None:
        await self.call("pause", timeout_s)

    async def receive(self, manifest: bytes, timeout_s: float) -> ReceiveAck:
        version, digest, seconds = await self.call("receive", manifest.hex())
        return ReceiveAck(version=version, digest=bytes.fromhex(digest), seconds=seconds)

    async def activate(self, version: int, timeout_s: float) -> int:
        return await self.call("activate", version, timeout_s)

    async def resume(self, timeout_s: float) -> None:
        await self.call("resume", timeout_s)

    async def republish(self, timeout_s: float) -> bytes:
        return bytes.fromhex(await self.call("republish"))

    async def prepare(self) -> bytes:
        return bytes.fromhex(await self.call("prepare"))

    async def join(self, member: bytes, timeout_s: float) -> None:
        await self.call("join", member.hex(), timeout_s)

    async def serve(self, manifest: bytes, timeout_s: float) -> None:
        await self.call("serve", manifest.hex())

    async def has(self, version: int) -> bool:
        want = {w.name: w.data.tobytes().hex() for w in make_weights(SHAPES, seed=version)}
        return await self.call("loaded") == [version, want]

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
        yield RemotePeer(name, process)
    finally:
        process.stdin.close()
        if process.returncode is None:
            process.kill()
        await process.wait()
