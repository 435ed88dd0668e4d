"""Kills the processes of this host that hang; see `rl_protocol.support.heartbeat`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rl_protocol.support.heartbeat import Stillness, read_beat

logger = logging.getLogger(__name__)
LOOKS = 10
"""Looks at a heartbeat after which its process counts as hanging."""
_DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


@dataclass(frozen=True, slots=True)
class Watched:
    """A process with a heartbeat.

    Attributes:
        name: of the process, in messages.
        file: its heartbeat.
    """

    name: str
    file: Path


@asynccontextmanager
async def heartbeat_watch(
    heartbeat_s: float, processes: Callable[[], Mapping[int, Watched]], say: Callable[[str], None]
) -> AsyncGenerator[None]:
    """Kill each process whose heartbeat stands still for `heartbeat_s` seconds; 0: none.

    Its calls then fail as those of any process that has died.

    Args:
        heartbeat_s: seconds.
        processes: those that are watched now, by id.
        say: prints a line.
    """
    if not heartbeat_s:
        yield
        return
    watching = asyncio.create_task(_watch(heartbeat_s, processes, say))
    try:
        yield
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def _watch(
    heartbeat_s: float, processes: Callable[[], Mapping[int, Watched]], say: Callable[[str], None]
) -> None:
    stillness, known = Stillness(LOOKS), dict[Path, psutil.Process]()
    while True:
        await asyncio.sleep(heartbeat_s / LOOKS)
        for pid, watched in processes().items():
            count = read_beat(watched.file)
            with suppress(psutil.NoSuchProcess):  # it has ended
                process = known.setdefault(watched.file, psutil.Process(pid))
                still = count is not None and stillness.look(str(watched.file), count)
                if still and process.is_running() and process.status() not in _DEAD:
                    process.kill()  # not one that has its id by now
                    line = f"{watched.name} (process {pid}) has not moved for {heartbeat_s:g} s (restart.heartbeat_s), so it is killed"
                    logger.error(line)
                    say(line)
