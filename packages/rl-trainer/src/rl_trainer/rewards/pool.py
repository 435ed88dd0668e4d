"""A reward function in processes of its own, so that a limit of time is kept whatever it does: a process that is late is killed and replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence
from contextlib import suppress
from math import ceil

import msgspec

from rl_protocol import ConfigError
from rl_protocol.errors import UNREADABLE
from rl_trainer.rewards.child import LENGTH, Hello
from rl_trainer.rewards.functions import Form, timed_out
from rl_trainer.rewards.outcomes import Failure, Outcome, Sample

START_TIMEOUT_S = 60.0
SIDE_BY_SIDE = 64
"""Most calls of an async function that wait at the same time in one process."""
MOST_BYTES = 2**28
"""No honest answer is longer."""
_PROGRAM = "from rl_trainer.rewards.child import main; main()"
_GRACE_S = 1.0
"""An async function is stopped by its own process first."""


class _Child:
    """One process, and the socket to it."""

    def __init__(self, process: subprocess.Popen[bytes], reader: StreamReader, writer: StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        """Done when the process has ended: the socket does not say so while a fork of it lives."""
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._end)
        self.form: Form = "single"

    @classmethod
    async def start(cls, name: str, timeout_s: float, memory_mb: int) -> _Child:
        mine, its = socket.socketpair()
        with its:
            reader, writer = await asyncio.open_connection(sock=mine)
            child = cls(_spawn(name, timeout_s, memory_mb, its), reader, writer)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                hello = msgspec.msgpack.decode(await child._receive(), type=Hello)
            if hello.error:
                raise ConfigError(hello.error)
        except BaseException as error:
            await child.kill()
            if not isinstance(error, (*UNREADABLE, TimeoutError, EOFError, OSError)):
                raise
            raise ConfigError(
                f"The process of reward.function={name!r} did not start: {error}. Its messages are in the log of the reward worker; "
                f"{memory_mb} MiB may be too little for what it imports (reward.memory_mb)."
            ) from error
        child.form = hello.form
        return child

    async def call(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Raises OSError, EOFError or what UNREADABLE names when the process is no good any more."""
        payload = msgspec.msgpack.encode(samples)
        self._writer.write(LENGTH.pack(len(payload)) + payload)
        await self._writer.drain()
        outcomes = msgspec.msgpack.decode(await self._receive(), type=list[Outcome])
        if len(outcomes) != len(samples):
            raise EOFError(f"{len(outcomes)} answers to {len(samples)} samples")
        return outcomes

    async def kill(self) -> None:
        """End it with all it has forked."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._writer.close()
        await self._ended
        self._process.wait()

    async def _receive(self) -> bytes:
        reading = asyncio.ensure_future(self._message())
        try:
            await asyncio.wait((reading, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise EOFError("the process has ended")
            return reading.result()
        finally:
            reading.cancel()

    async def _message(self) -> bytes:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if length > MOST_BYTES:
            raise EOFError(f"an answer of {length} bytes")
        return await self._reader.readexactly(length)

    def _end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._ended.set_result(None)


def _spawn(name: str, timeout_s: float, memory_mb: int, connection: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM, name, str(timeout_s), str(memory_mb)],
        stdin=connection.fileno(),
        stdout=sys.__stderr__,
        start_new_session=True,  # its forks are killed with it
    )


class ScorerPool:
    """Scorer over `workers` processes.

    Lifecycle: `await ScorerPool.open(...)`, then `score` as often as needed, then `close`. Of a call that fails as a whole (a batch that raises, a
    process that is killed with many samples in it) every sample is tried again alone, so that only those that are to blame have failed.
    """

    def __init__(self, name: str, workers: int, timeout_s: float, memory_mb: int) -> None:
        self._name = name
        self._workers = workers
        self._timeout_s = timeout_s
        self._memory_mb = memory_mb
        self._form: Form = "single"
        self._idle: asyncio.Queue[_Child | None] = asyncio.Queue()
        """Children that have nothing to do; None: one that is to be started."""

    @classmethod
    async def open(cls, name: str, *, workers: int, timeout_s: float, memory_mb: int) -> ScorerPool:
        """Start the first process; the others start when they are needed.

        Args:
            name: of the function, see `loading`.
            workers: processes.
            timeout_s: longest time of one call.
            memory_mb: address space of each process, MiB.

        Raises:
            ConfigError: the function can't be loaded.
        """
        pool = cls(name, workers, timeout_s, memory_mb)
        first = await _Child.start(name, timeout_s, memory_mb)
        pool._form = first.form
        for child in (first, *[None] * (workers - 1)):
            pool._idle.put_nowait(child)
        return pool

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """See Scorer."""
        if not samples:
            return []
        share = ceil(len(samples) / self._workers)
        size = {"single": 1, "batch": share, "async": min(share, SIDE_BY_SIDE)}[self._form]
        chunks = [samples[i : i + size] for i in range(0, len(samples), size)]
        return [outcome for chunk in await asyncio.gather(*map(self._chunk, chunks)) for outcome in chunk]

    async def close(self) -> None:
        """Kill all processes; safe to call twice. No call may be under way."""
        for _ in range(self._idle.qsize()):
            child = self._idle.get_nowait()
            if child is not None:
                await child.kill()
            self._idle.put_nowait(None)

    async def _chunk(self, samples: Sequence[Sample]) -> list[Outcome]:
        outcomes = await self._attempt(samples)
        if len(samples) == 1 or not all(isinstance(one, Failure) for one in outcomes):
            return outcomes
        again = await asyncio.gather(*(self._attempt([sample]) for sample in samples))
        return [outcome for one in again for outcome in one]

    async def _attempt(self, samples: Sequence[Sample]) -> list[Outcome]:
        child = await self._idle.get()
        back: _Child | None = None
        try:
            child = child or await _Child.start(self._name, self._timeout_s, self._memory_mb)
            limit = self._timeout_s + (_GRACE_S if self._form == "async" else 0.0)
            async with asyncio.timeout(limit):
                outcomes = await child.call(samples)
            back = child
            return outcomes
        except TimeoutError:
            failure = timed_out(self._timeout_s)
        except (EOFError, OSError, *UNREADABLE) as error:
            failure = Failure(kind="died", message=f"ended or spoiled its process: {error}")
        except ConfigError as error:  # a process that can't be started again
            failure = Failure(kind="died", message=str(error))
        finally:
            if back is None and child is not None:
                await asyncio.shield(child.kill())
            self._idle.put_nowait(back)
        return [failure] * len(samples)
