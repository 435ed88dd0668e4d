"""Texts of Ray's errors."""

from __future__ import annotations

import re

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def plain(error: BaseException) -> str:
    """The text of an error without colours."""
    return _ANSI.sub("", str(error))


def reason_of(error: BaseException) -> str:
    """Why a process has ended: the first and the last line of Ray's error."""
    lines = [line.strip() for line in plain(error).splitlines() if line.strip()]
    return f"{lines[0]} {lines[-1]}" if len(lines) > 1 else " ".join(lines)
