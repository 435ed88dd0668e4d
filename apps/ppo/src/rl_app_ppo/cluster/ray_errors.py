"""Texts of Ray's errors."""

from __future__ import annotations

import re

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_CAUSES = re.compile(r"Some common causes include: .*")
"""What Ray adds, in 600 characters, where it does not know why a process has ended."""


def plain(error: BaseException) -> str:
    """The text of an error without colours."""
    return _ANSI.sub("", str(error))


def reason_of(error: BaseException) -> str:
    """Why a process has ended: the first and the last line of Ray's error, each with a full stop.

    >>> reason_of(RuntimeError("The actor died.\\n\\tactor_id: 1\\n its node received SIGTERM"))
    'The actor died. its node received SIGTERM.'
    """
    text = _CAUSES.sub("It was killed, for instance for lack of memory (see dmesg), or crashed", plain(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(line if line.endswith(".") else f"{line}." for line in dict.fromkeys([*lines[:1], *lines[-1:]]))
