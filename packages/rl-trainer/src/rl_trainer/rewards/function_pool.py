"""Runs a reward function in separate processes and kills those that exceed the time limit."""

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
from rl_protocol.support.host.process_watch import open_process
from rl_trainer.rewards.function_process import LENGTH, Hello
from rl_trainer.rewards.functions import Form, timed_out
from rl_trainer.rewards.scorer import Failure, Outcome, Sample

START_TIMEOUT_S = 60.0
CONCURRENT_CALLS = 64
"""Largest number of concurrent calls of an async function in one process."""
MOST_BYTES = 2**28
"""Largest answer that a process may send."""
_PROGRAM = "from rl_trainer.rewards.function_process import main; main()"
_GRACE_S = 1.0
"""Additional time for async functions, which their process stops first."""
LATE_S = 0.25
"""A call for one sample that takes longer than this and ten times the mean is late."""
MOST_LATE = 8
"""Largest number of late calls per worker; each occupies a process."""
_LATE_NICE = 5


class _ScorerProcess:
    """A process that runs the reward function, and the socket to it."""

    def __init__(self, process: subprocess.Popen[bytes], reader: StreamReader, writer: StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        """Done when the process has ended; the socket stays open while a fork of it lives."""
        self._end_fd = open_process(process.pid)
        self._loop.add_reader(self._end_fd, self._end)
        self.form: Form = "single"
        self.where = ""

    @classmethod
    async def start(cls, name: str, timeout_s: float, memory_mb: int) -> _ScorerProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            child = cls(_spawn(name, timeout_s, memory_mb, theirs), reader, writer)
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
                f"The process of ScorerPool.name={name!r} did not start: {error}. Its output is in the log of the reward worker; "
                f"{memory_mb} MiB may be too little for what it imports (ScorerPool.memory_mb)."
            ) from error
        child.form, child.where = hello.form, hello.where
        return child

    async def call(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Score samples; OSError, EOFError or one of UNREADABLE if the process is unusable."""
        payload = msgspec.msgpack.encode(samples)
        self._writer.write(LENGTH.pack(len(payload)) + payload)
        await self._writer.drain()
        outcomes = msgspec.msgpack.decode(await self._receive(), type=list[Outcome])
        if len(outcomes) != len(samples):
            raise EOFError(f"{len(outcomes)} answers for {len(samples)} samples")
        return outcomes

    def lower_priority(self) -> None:
        """Lower the CPU priority of the process and its forks."""
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PGRP, self._process.pid, _LATE_NICE)

    async def kill(self) -> None:
        """Kill the process and its forks."""
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
        self._loop.remove_reader(self._end_fd)
        os.close(self._end_fd)
        self._ended.set_result(None)


def _spawn(name: str, timeout_s: float, memory_mb: int, connection: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-u", "-P", "-c", _PROGRAM, name, str(timeout_s), str(memory_mb)],  # it is killed at the end
        stdin=connection.fileno(),
        stdout=sys.__stderr__,
        start_new_session=True,  # so that its forks can be killed with it
    )


class ScorerPool:
    """Scorer that runs a function in `workers` processes.

    Lifecycle: `await ScorerPool.open(...)`, then `score` any number of times, then `close`.

    If a call with several samples fails as a whole (a batch function raises, or its process is
    killed), every sample is retried alone, so that only the samples that cause the failure fail.
    If a batch has the wrong number of results, and each sample alone has one, all of them fail.

    A late call (LATE_S) releases its slot to the next one. Calls that never return therefore wait
    for their limit concurrently, and other calls do not wait for them: `score` returns at most
    timeout_s after its last call has started. If n > (MOST_LATE + 1) * workers calls never return,
    they time out in n / ((MOST_LATE + 1) * workers) rounds. A call with several samples may use up
    its limit once more before its samples are retried.
    """

    reads_tokens: bool = False

    def __init__(self, name: str, workers: int, timeout_s: float, memory_mb: int) -> None:
        self._name = name
        self._workers = workers
        self._timeout_s = timeout_s
        self._memory_mb = memory_mb
        self._form: Form = "single"
        self._where = ""
        self._slots = Slots(workers)
        self._idle: list[_ScorerProcess] = []
        """Idle processes, at most `workers`."""
        self._spare: asyncio.Task[_ScorerProcess] | None = None
        """A process started in advance, so that a call after a late or fatal one need not wait."""

    @classmethod
    async def open(cls, name: str, *, workers: int, timeout_s: float, memory_mb: int) -> ScorerPool:
        """Start the first process; the others start on demand.

        Args:
            name: of the function; see `rl_trainer.rewards.loading`.
            workers: number of concurrent calls, not counting late ones.
            timeout_s: time limit of a call.
            memory_mb: limit of the address space of each process, MiB; only Linux has it.

        Raises:
            ConfigError: the function can't be loaded.
        """
        pool = cls(name, workers, timeout_s, memory_mb)
        first = await _ScorerProcess.start(name, timeout_s, memory_mb)
        pool._form, pool._where = first.form, first.where
        pool._idle.append(first)
        return pool

    @property
    def compares(self) -> bool:
        """True for a batch function."""
        return self._form == "batch"

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        if not samples:
            return []
        share = ceil(len(samples) / self._workers)
        size = {"single": 1, "batch": share, "async": min(share, CONCURRENT_CALLS)}[self._form]
        chunks = [samples[i : i + size] for i in range(0, len(samples), size)]
        return [outcome for chunk in await asyncio.gather(*map(self._chunk, chunks)) for outcome in chunk]

    async def close(self) -> None:
        """Kill all processes; safe to call twice. No call may be in progress."""
        if self._spare is not None:
            spare, self._spare = self._spare, None
            spare.cancel()  # has no effect if it has started
            await asyncio.wait({spare})
            if not spare.cancelled() and spare.exception() is None:
                self._idle.append(spare.result())
        while self._idle:
            await self._idle.pop().kill()

    async def _chunk(self, samples: Sequence[Sample]) -> list[Outcome]:
        outcomes = await self._attempt(samples)
        failures = [one for one in outcomes if isinstance(one, Failure)]
        if len(samples) == 1 or len(failures) < len(samples):
            return outcomes
        again = await asyncio.gather(*(self._attempt([sample]) for sample in samples))
        alone = [outcome for one in again for outcome in one]
        if failures[0].kind == "no_number" and not any(isinstance(one, Failure) for one in alone):
            return outcomes  # no sample explains the missing results: the function misreads batches
        return alone

    async def _attempt(self, samples: Sequence[Sample]) -> list[Outcome]:
        async with self._slots.acquire() as slot:
            child: _ScorerProcess | None = None
            good = False
            try:
                child = self._idle.pop() if self._idle else await self._another()
                outcomes = await self._call(child, samples, slot)
                good = True
                return outcomes
            except TimeoutError:
                failure = timed_out(self._timeout_s)
            except (EOFError, OSError, *UNREADABLE) as error:
                failure = Failure(kind="died", message=f"ended or broke its process: {error}")
            except ConfigError as error:  # a process that can't be started again
                failure = Failure(kind="died", message=str(error))
            finally:
                if child is not None and good and not slot.late and len(self._idle) < self._workers:
                    self._idle.append(child)
                elif child is not None:
                    await asyncio.shield(child.kill())
        return [msgspec.structs.replace(failure, where=self._where)] * len(samples)

    async def _call(self, child: _ScorerProcess, samples: Sequence[Sample], slot: Slot) -> list[Outcome]:
        loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
        alone = len(samples) == 1  # a call with several samples is never late
        if alone:
            timers.append(loop.call_later(self._slots.late_after(), self._release_late, slot, child))
        start = loop.time()
        try:
            async with asyncio.timeout(self._timeout_s + (_GRACE_S if self._form == "async" else 0.0)):
                outcomes = await child.call(samples)
        finally:
            for timer in timers:
                timer.cancel()
        if alone:
            self._slots.record(loop.time() - start)
        return outcomes

    def _release_late(self, slot: Slot, child: _ScorerProcess) -> None:
        if self._slots.release_late(slot):
            child.lower_priority()

    async def _another(self) -> _ScorerProcess:
        """The spare process, or a new one; starts the next spare."""
        spare, self._spare = self._spare, asyncio.create_task(self._start())
        return await (self._start() if spare is None else spare)

    async def _start(self) -> _ScorerProcess:
        return await _ScorerProcess.start(self._name, self._timeout_s, self._memory_mb)


@dataclass
class Slot:
    """The permission of one call to run."""

    late: bool = False


class Slots:
    """Limits concurrency to `workers` calls, plus late ones."""

    def __init__(self, workers: int) -> None:
        self._free = asyncio.Semaphore(workers)
        self._room = MOST_LATE * workers
        self._calls = 0
        self._seconds = 0.0

    @asynccontextmanager
    async def acquire(self) -> AsyncGenerator[Slot]:
        """Wait for a slot; it is released on exit."""
        await self._free.acquire()
        slot = Slot()
        try:
            yield slot
        finally:
            if slot.late:
                self._room += 1
            else:
                self._free.release()

    def release_late(self, slot: Slot) -> bool:
        """Release the slot of a late call that keeps running; False if MOST_LATE is reached."""
        if not self._room:
            return False
        self._room -= 1
        slot.late = True
        self._free.release()
        return True

    def record(self, seconds: float) -> None:
        """Record the duration of a call for one sample."""
        self._calls += 1
        self._seconds += seconds

    def late_after(self) -> float:
        """Seconds after which a call for one sample is late."""
        return max(LATE_S, 10 * self._seconds / self._calls if self._calls else 0.0)
