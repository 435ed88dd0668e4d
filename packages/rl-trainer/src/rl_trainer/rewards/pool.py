"""A reward function in processes of its own, so that a limit of time is kept whatever it does: a process that is late is killed and replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
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
LATE_S = 0.25
"""A call for one sample that takes longer than this, and than ten times the mean, gives its turn to the next one and goes on beside it."""
MOST_LATE = 8
"""Calls for each worker that may go on in that way; each has a process."""
_LATE_NICE = 5


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

    def step_back(self) -> None:
        """Have it and all it has forked take less of a processor that others want."""
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PGRP, self._process.pid, _LATE_NICE)

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

    A call that is late (LATE_S) gives its turn to the next: calls that never return wait for their limit side by side, and no other waits for them.
    So `score` returns, at the latest, timeout_s after the last call has begun, since each may take that long; with n > (MOST_LATE + 1) * workers that
    never return they do so in n / ((MOST_LATE + 1) * workers) rounds. A function that takes many samples at once has its limit once more before
    that, in the call that fails as a whole.
    """

    reads_tokens: bool = False

    def __init__(self, name: str, workers: int, timeout_s: float, memory_mb: int) -> None:
        self._name = name
        self._workers = workers
        self._timeout_s = timeout_s
        self._memory_mb = memory_mb
        self._form: Form = "single"
        self._turns = Turns(workers)
        self._idle: list[_Child] = []
        """Processes that have nothing to do, at most `workers`."""
        self._spare: asyncio.Task[_Child] | None = None
        """One more than are at work: the call that comes after a late one, or after one that killed its process, need not wait for a start."""

    @classmethod
    async def open(cls, name: str, *, workers: int, timeout_s: float, memory_mb: int) -> ScorerPool:
        """Start the first process; the others start when they are needed.

        Args:
            name: of the function, see `loading`.
            workers: calls that run side by side, late ones not counted.
            timeout_s: longest time of one call.
            memory_mb: address space of each process, MiB.

        Raises:
            ConfigError: the function can't be loaded.
        """
        pool = cls(name, workers, timeout_s, memory_mb)
        first = await _Child.start(name, timeout_s, memory_mb)
        pool._form = first.form
        pool._idle.append(first)
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
        if self._spare is not None:
            spare, self._spare = self._spare, None
            spare.cancel()  # too late for one that has started
            await asyncio.wait({spare})
            if not spare.cancelled() and spare.exception() is None:
                self._idle.append(spare.result())
        while self._idle:
            await self._idle.pop().kill()

    async def _chunk(self, samples: Sequence[Sample]) -> list[Outcome]:
        outcomes = await self._attempt(samples)
        if len(samples) == 1 or not all(isinstance(one, Failure) for one in outcomes):
            return outcomes
        again = await asyncio.gather(*(self._attempt([sample]) for sample in samples))
        return [outcome for one in again for outcome in one]

    async def _attempt(self, samples: Sequence[Sample]) -> list[Outcome]:
        async with self._turns.take() as turn:
            child: _Child | None = None
            good = False
            try:
                child = self._idle.pop() if self._idle else await self._another()
                outcomes = await self._call(child, samples, turn)
                good = True
                return outcomes
            except TimeoutError:
                failure = timed_out(self._timeout_s)
            except (EOFError, OSError, *UNREADABLE) as error:
                failure = Failure(kind="died", message=f"ended or spoiled its process: {error}")
            except ConfigError as error:  # a process that can't be started again
                failure = Failure(kind="died", message=str(error))
            finally:
                if child is not None and good and not turn.late and len(self._idle) < self._workers:
                    self._idle.append(child)
                elif child is not None:
                    await asyncio.shield(child.kill())
        return [failure] * len(samples)

    async def _call(self, child: _Child, samples: Sequence[Sample], turn: Turn) -> list[Outcome]:
        loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
        alone = len(samples) == 1  # a call for many takes its time
        if alone:
            timers.append(loop.call_later(self._turns.late_after(), self._give_up, turn, child))
        start = loop.time()
        try:
            async with asyncio.timeout(self._timeout_s + (_GRACE_S if self._form == "async" else 0.0)):
                outcomes = await child.call(samples)
        finally:
            for timer in timers:
                timer.cancel()
        if alone:
            self._turns.returned(loop.time() - start)
        return outcomes

    def _give_up(self, turn: Turn, child: _Child) -> None:
        if self._turns.give_up(turn):
            child.step_back()

    async def _another(self) -> _Child:
        """The spare one, or a new one where there is none; and a spare one for the next time."""
        spare, self._spare = self._spare, asyncio.create_task(self._start())
        return await (self._start() if spare is None else spare)

    async def _start(self) -> _Child:
        return await _Child.start(self._name, self._timeout_s, self._memory_mb)


@dataclass
class Turn:
    """The right of one call to run."""

    late: bool = False


class Turns:
    """Who may run: `workers` calls, and late ones beside them."""

    def __init__(self, workers: int) -> None:
        self._free = asyncio.Semaphore(workers)
        self._room = MOST_LATE * workers
        self._calls = 0
        self._seconds = 0.0

    @asynccontextmanager
    async def take(self) -> AsyncGenerator[Turn]:
        """Wait for a turn, and have it until the end."""
        await self._free.acquire()
        turn = Turn()
        try:
            yield turn
        finally:
            if turn.late:
                self._room += 1
            else:
                self._free.release()

    def give_up(self, turn: Turn) -> bool:
        """Let the next one have it; whether there was room for one more late call."""
        if not self._room:
            return False
        self._room -= 1
        turn.late = True
        self._free.release()
        return True

    def returned(self, seconds: float) -> None:
        """A call for one sample took so long."""
        self._calls += 1
        self._seconds += seconds

    def late_after(self) -> float:
        """Seconds after which a call is late."""
        return max(LATE_S, 10 * self._seconds / self._calls if self._calls else 0.0)
