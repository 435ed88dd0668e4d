"""Finds the files of code that settings name."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NAMED = re.compile(r"([^\s=,\[\]*'\"]+(?:\.py(?=:)|\.toml))")
"""A file of code, or of a scorer, in the value of a setting."""
_SERVERS = "rollout.agent.mcp.servers"
"""The setting that names a file of programs to start."""


def code_files(key: str, value: str) -> Sequence[str]:
    """The files of code in the value of a setting, which may list several, as they are written."""
    return [value] if key == _SERVERS and value else _NAMED.findall(value)
