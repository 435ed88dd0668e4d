"""Texts of Ray's errors."""

from __future__ import annotations

import re

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def plain(error: BaseException) -> str:
    """The text of an error without colours."""
    return _ANSI.sub("", str(error))


def reason_of(error: BaseException) -> str:
    """Why a process has ended: the first and the last line of Ray's error, each with a full stop.

    >>> reason_of(RuntimeError("The actor died.\\n\\tactor_id: 1\\n its node received SIGTERM"))
    'The actor died. its node received SIGTERM.'
    """
    lines = [line.strip() for line in plain(error).splitlines() if line.strip()]
    return " ".join(line if line.endswith(".") else f"{line}." for line in dict.fromkeys([*lines[:1], *lines[-1:]]))
