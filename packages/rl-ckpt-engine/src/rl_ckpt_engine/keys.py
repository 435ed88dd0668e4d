"""The secret that the processes of one weight synchronisation share when they meet over a network: where it comes from, what it proves."""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from rl_protocol.errors import ConfigError

KEY_FILE = "RL_CKPT_KEY_FILE"
KEY = "RL_CKPT_KEY"
MIN_CHARACTERS = 32
HOW_TO_SET = (
    f"set {KEY_FILE} to a file of mode 0600 (or {KEY} itself) that holds a random text of at least {MIN_CHARACTERS} characters, such as "
    "`openssl rand -hex 32` prints, the same for the sender and all receivers"
)
PROOF_BYTES = 32


class SyncKey:
    """The secret, or its absence; never shown.

    >>> SyncKey(b"x" * 32), bool(SyncKey(b""))
    (SyncKey(set), False)
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __bool__(self) -> bool:
        return bool(self._secret)

    def __repr__(self) -> str:
        return f"SyncKey({'set' if self else 'none'})"

    def proof(self, *parts: bytes) -> bytes:
        """32 bytes that only who has the key can make from the parts; the parts must have fixed lengths."""
        return hmac.digest(self._secret, b"".join(parts), "sha256")


def load_key(environment: Mapping[str, str] = os.environ) -> SyncKey:
    """The key that this process was given, if any.

    Raises:
        ConfigError: both variables are set, the file can't be read or others may read it, or the key is too short. Never shows the key.
    """
    text, file = environment.get(KEY, ""), environment.get(KEY_FILE, "")
    if text and file:
        raise ConfigError(f"Both {KEY} and {KEY_FILE} are set; unset one.")
    if file:
        text = _read(Path(file))
    text = text.strip()
    if (text or file) and len(text) < MIN_CHARACTERS:
        raise ConfigError(f"The key of the weight synchronisation has {len(text)} characters: {HOW_TO_SET}.")
    return SyncKey(text.encode())


def _read(file: Path) -> str:
    try:
        mode = file.stat().st_mode
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{KEY_FILE}: {file} can't be read: {type(error).__name__}; {HOW_TO_SET}.") from None
    if mode & 0o077:
        raise ConfigError(f"{KEY_FILE}: others may read {file} (mode {mode & 0o777:04o}); run chmod 600 {file}.")
    return text
