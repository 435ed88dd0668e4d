"""Identify the host, to tell whether two processes can share memory."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path

from rl_protocol.errors import OutputError
from rl_protocol.support.host.portable import SHARED_FOLDER, uses_linux

MARK = "RL_HOST"
"""Environment variable: processes with different values share no memory, as if on several hosts."""


@cache
def this_host() -> str:
    """A name that two processes share exactly if they can map each other's memory.

    On Linux they run under the same kernel boot and pid namespace; elsewhere they have the same
    user and SHARED_FOLDER (`host.shared_memory`). Different values of the environment variable
    RL_HOST divide the processes of one machine into several hosts, for tests.

    Raises:
        OutputError: SHARED_FOLDER can't be written.
    """
    name = boot_and_namespace("pid") if uses_linux() else _name_in_file()
    mark = os.environ.get(MARK)
    return f"{name}/{mark}" if mark else name


def boot_and_namespace(kind: str) -> str:
    """The boot of the Linux kernel, and a namespace of this process: pid, net."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink(f'/proc/self/ns/{kind}')}"  # noqa: PTH115 - not a path


def _name_in_file() -> str:
    """A random name in a file, which the first process of a user writes."""
    file = SHARED_FOLDER / f"rl-host-{os.geteuid()}"
    fresh = file.with_name(f".{file.name}-{uuid.uuid4().hex}")
    try:
        if not file.exists():
            fresh.write_text(uuid.uuid4().hex)
            with suppress(FileExistsError):  # another process was first
                os.link(fresh, file)
        if file.stat().st_uid != os.geteuid():
            raise OutputError(f"{file} belongs to another user; remove it.")
        return file.read_text()
    except OSError as error:
        raise OutputError(
            f"{file}, which names this host for your processes, can't be used: {error}. Make that folder writable."
        ) from error
    finally:
        fresh.unlink(missing_ok=True)
