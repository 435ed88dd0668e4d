"""Read a shared secret from the environment and prove possession of it over a network."""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rl_protocol.errors import ConfigError

MIN_CHARACTERS = 32
PROOF_BYTES = 32


class Secret:
    """A secret, possibly empty; never printed.

    >>> Secret(b"x" * 32), bool(Secret(b""))
    (Secret(set), False)
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __bool__(self) -> bool:
        return bool(self._secret)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'set' if self else 'none'})"

    def proof(self, *parts: bytes) -> bytes:
        """HMAC-SHA256 of the parts, PROOF_BYTES long. The parts must have fixed lengths."""
        return hmac.digest(self._secret, b"".join(parts), "sha256")


@dataclass(frozen=True, slots=True)
class SecretSource:
    """The two environment variables that may hold a secret."""

    variable: str
    """Holds the secret itself."""
    file_variable: str
    """Names a file that holds it and that other users can't read."""
    what: str
    """What the secret protects, for messages: "the data plane"."""
    sharers: str
    """Which processes need the same secret, for messages: "the plane and all its clients"."""

    @property
    def how_to_set(self) -> str:
        """Instruction for a user who has not set the secret."""
        return (
            f"set {self.file_variable} to a file of mode 0600 (or {self.variable} itself) that holds a random text of at least "
            f"{MIN_CHARACTERS} characters, such as `openssl rand -hex 32` prints, the same for {self.sharers}"
        )

    def read(self, environment: Mapping[str, str] = os.environ) -> bytes:
        """The secret of this process; empty if none is set.

        Raises:
            ConfigError: both variables are set, the file can't be read or other users may read it,
                or the secret is too short. The message never contains the secret.
        """
        text, file = environment.get(self.variable, ""), environment.get(self.file_variable, "")
        if text and file:
            raise ConfigError(f"Both {self.variable} and {self.file_variable} are set; unset one.")
        if file:
            text = self._read_file(Path(file))
        text = text.strip()
        if (text or file) and len(text) < MIN_CHARACTERS:
            raise ConfigError(f"The key of {self.what} has {len(text)} characters: {self.how_to_set}.")
        return text.encode()

    def _read_file(self, file: Path) -> str:
        name = self.file_variable
        try:
            mode = file.stat().st_mode
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name}: {file} can't be read: {type(error).__name__}; {self.how_to_set}.") from None
        if mode & 0o077:
            raise ConfigError(f"{name}: others may read {file} (mode {mode & 0o777:04o}); run chmod 600 {file}.")
        return text
