"""A Ray that belongs to one run: its sockets, logs and token are in a folder that no other user can enter."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from rl_protocol.temporary import temporary_folder

TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"  # noqa: S105 - the name of a variable
_PREFIX = "rl-app-ppo-ray-"


@contextmanager
def private_folder() -> Generator[Path]:
    """A folder for ray.init(_temp_dir=...) in one of mode 0700, beside the token that Ray of this process and its children asks callers for.

    Ray opens what it is given to everybody, hence the folder around it. That one is below RAY_TMPDIR or /tmp: the path of a unix socket may
    have 107 bytes, too few for many a TMPDIR.
    """
    with temporary_folder(_PREFIX, Path(os.environ.get("RAY_TMPDIR", "/tmp"))) as folder:
        token = folder / "token"
        with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(_token())
        os.environ[TOKEN_PATH] = str(token)
        try:
            yield folder / "ray"
        finally:
            del os.environ[TOKEN_PATH]


@cache
def _token() -> str:
    """One for all sessions of this process: Ray reads it once."""
    return secrets.token_hex(32)
