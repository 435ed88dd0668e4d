"""Kills the processes of a run that hang; see `rl_protocol.support.heartbeat`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from rl_app_ppo.cluster.heartbeats import HostBeats, OtherHost, Watched
from rl_app_ppo.cluster.hung_processes import HungProcesses
from rl_app_ppo.driver.background import running
from rl_protocol import WorkerError
from rl_protocol.support.heartbeat import Stillness

logger = logging.getLogger(__name__)
LOOKS = 10
"""Looks at a heartbeat after which its process counts as hanging."""


class OtherBeats(Protocol):
    """The heartbeats of other hosts; see `HostProcesses`."""

    async def counts(self, host: OtherHost, files: Mapping[int, Path]) -> Mapping[int, int]:
        """The counts of processes of a host, without those that have ended.

        Raises:
            WorkerError: they can't be read.
        """
        ...

    async def kill(self, host: OtherHost, pid: int) -> bool:
        """Kill a process of the last `counts`; returns whether it ran.

        Raises:
            WorkerError: it is not known.
        """
        ...


@asynccontextmanager
async def heartbeat_watch(
    heartbeat_s: float,
    processes: Callable[[], Iterable[Watched]],
    others: OtherBeats,
    hung: HungProcesses,
    say: Callable[[str], None],
) -> AsyncGenerator[None]:
    """Kill each process whose heartbeat stands still for `heartbeat_s` seconds; 0: none.

    Its calls then fail as those of any process that has died.

    Args:
        heartbeat_s: seconds.
        processes: those that are watched now.
        others: reads the heartbeats of other hosts.
        hung: gets the processes that are killed.
        say: prints a line.
    """
    if not heartbeat_s:
        yield
        return
    async with running(_Watch(heartbeat_s, others, hung, say).run(processes)):
        yield


class _Watch:
    def __init__(self, heartbeat_s: float, others: OtherBeats, hung: HungProcesses, say: Callable[[str], None]) -> None:
        self._heartbeat_s = heartbeat_s
        self._here = HostBeats()
        self._others = others
        self._hung = hung
        self._say = say
        self._stillness = Stillness(LOOKS)
        self._silent: dict[OtherHost | None, str] = {}
        """Hosts whose last look failed, and why."""

    async def run(self, processes: Callable[[], Iterable[Watched]]) -> None:
        """Look at all hosts, again and again; at each only after it has answered the last look."""
        looks: dict[OtherHost | None, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self._heartbeat_s / LOOKS)
                for host, watched in _by_host(processes()).items():
                    if host not in looks or looks[host].done():
                        looks[host] = tasks.create_task(self._look(host, watched))

    async def _look(self, host: OtherHost | None, watched: Sequence[Watched]) -> None:
        """Look at the processes of one host. Those of a host that does not answer are not still."""
        files = {one.pid: one.file for one in watched}
        try:
            async with asyncio.timeout(self._heartbeat_s):
                counts = self._here.counts(files) if host is None else await self._others.counts(host, files)
                for one in watched:
                    count = counts.get(one.pid)
                    if count is not None and self._stillness.look(f"{host} {one.file}", count):
                        await self._kill(one)
            self._silent.pop(host, None)
        except TimeoutError:
            self._warn(host, f"no answer within {self._heartbeat_s:g} s")
        except WorkerError as error:
            self._warn(host, str(error))

    def _warn(self, host: OtherHost | None, why: str) -> None:
        """Say that a host is not watched, once for each reason in a row."""
        if self._silent.get(host) != why:
            self._silent[host] = why
            logger.warning("No process of %s is watched: %s", host, why)

    async def _kill(self, one: Watched) -> None:
        self._hung.add(one, self._heartbeat_s)  # calls of the process may fail before the kill has returned
        ran = self._here.kill(one.pid) if one.host is None else await self._others.kill(one.host, one.pid)
        if not ran:
            self._hung.discard(one)
        else:
            line = f"{one.name} (process {one.pid}) has not moved for {self._heartbeat_s:g} s (restart.heartbeat_s), so it is killed"
            logger.error(line)
            self._say(line)


def _by_host(processes: Iterable[Watched]) -> dict[OtherHost | None, list[Watched]]:
    found: dict[OtherHost | None, list[Watched]] = {}
    for one in processes:
        found.setdefault(one.host, []).append(one)
    return found
