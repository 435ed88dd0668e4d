"""Python stacks of this process, of its asyncio tasks, and of other processes.

Other processes write their stacks themselves, at the signal DUMP, which needs neither their event
loop nor their GIL: a process that hangs in native code answers too. Only a stopped one does not.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import CoroutineType, FrameType

import psutil

from rl_protocol.support.stack_dumps import DUMP

_WAIT_S = 1.0
"""Seconds that the processes have to write."""


def own_stacks() -> str:
    """The stacks of the threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented, and the only way
    own = threading.get_ident()
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames.items()
        if ident != own
    )


def task_stacks(loop: asyncio.AbstractEventLoop) -> str:
    """For each unfinished task of an event loop: its coroutines, down to what it waits for."""
    lines: list[str] = []
    for task in asyncio.all_tasks(loop):
        lines.append(f"task {task.get_name()}:")
        awaited: object = task.get_coro()
        while isinstance(awaited, CoroutineType):
            frame: FrameType | None = awaited.cr_frame
            if frame is not None:
                lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {awaited.__qualname__}')
            awaited = awaited.cr_await
    return "\n".join(lines)


def dumped_stacks(pids: Iterable[int], logs: Path) -> Mapping[str, str]:
    """Have processes of this host dump their stacks; log name -> what was appended to it meanwhile.

    Args:
        pids: the processes; those that do not catch DUMP, which would end them, are left out.
        logs: folder of their logs, `*.log`.
    """
    sizes = {path: path.stat().st_size for path in logs.glob("*.log")}
    for pid in pids:
        if catches_dump(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, DUMP)
    time.sleep(_WAIT_S)
    grown = {path: _after(path, size) for path, size in sizes.items()}
    return {path.stem: text for path, text in sorted(grown.items()) if text}


def catches_dump(pid: int) -> bool:
    """Whether a process of this host has a handler of DUMP, so that the signal does not end it.

    False where only the process itself could say so, elsewhere than on Linux.
    """
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (DUMP - 1) & 1)
    return False


def descendants(pid: int) -> list[int]:
    """All processes that a process of this host has started, and theirs."""
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def _after(path: Path, size: int) -> str:
    with path.open("rb") as file:
        file.seek(size)
        return file.read().decode("utf-8", "replace")
