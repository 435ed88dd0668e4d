"""The one secret of a plane that other hosts can reach: where it comes from, and what is derived from it.

The secret is shared by all processes of the plane and all its clients. From it come

* the CURVE key pair of the control sockets. The server's public key is as secret as the key itself: it is derived, never sent, and a peer that
  does not know it can't say anything that the server decrypts. Control messages are encrypted and authenticated in both directions;
* the proofs (HMAC-SHA256 over fresh nonces of both sides) with which both ends of a bulk connection show that they know it. What follows on such a
  connection is neither encrypted nor authenticated byte by byte: see the threat model in the README.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

import zmq
from zmq.utils import z85

from rl_protocol.errors import ConfigError

KEY_FILE = "RL_TQ_KEY_FILE"
KEY = "RL_TQ_KEY"
MIN_CHARACTERS = 32
HOW_TO_SET = (
    f"set {KEY_FILE} to a file of mode 0600 (or {KEY} itself) that holds a random text of at least {MIN_CHARACTERS} characters, such as "
    "`openssl rand -hex 32` prints, the same for the plane and all its clients"
)
PROOF_BYTES = 32


class PlaneKey:
    """The secret, or its absence; never shown.

    >>> PlaneKey(b"x" * 32), bool(PlaneKey(b""))
    (PlaneKey(set), False)
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __bool__(self) -> bool:
        return bool(self._secret)

    def __repr__(self) -> str:
        return f"PlaneKey({'set' if self else 'none'})"

    def proof(self, *parts: bytes) -> bytes:
        """32 bytes that only who has the key can make from the parts; the parts must have fixed lengths."""
        return hmac.digest(self._secret, b"".join(parts), "sha256")

    def curve_pair(self) -> tuple[bytes, bytes]:
        """Public and secret CURVE key of the plane's servers, in Z85."""
        secret = z85.encode(hmac.digest(self._secret, b"rl-transferqueue curve server", hashlib.sha256))
        return zmq.curve_public(secret), secret

    def protect_server(self, socket: zmq.Socket[bytes]) -> None:
        """Endpoints that the socket binds from here on serve only peers with the key; without a key nothing changes."""
        if self:
            socket.curve_secretkey = self.curve_pair()[1]
            socket.curve_server = True

    def protect_client(self, socket: zmq.Socket[bytes]) -> None:
        """Endpoints that the socket connects to from here on must know the key; without a key nothing changes."""
        if self:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = self.curve_pair()[0]


def load_key(environment: Mapping[str, str] = os.environ) -> PlaneKey:
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
        raise ConfigError(f"The key of the data plane has {len(text)} characters: {HOW_TO_SET}.")
    return PlaneKey(text.encode())


def _read(file: Path) -> str:
    try:
        mode = file.stat().st_mode
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{KEY_FILE}: {file} can't be read: {type(error).__name__}; {HOW_TO_SET}.") from None
    if mode & 0o077:
        raise ConfigError(f"{KEY_FILE}: others may read {file} (mode {mode & 0o777:04o}); run chmod 600 {file}.")
    return text
