"""The secret of a plane that other hosts can reach, and the keys derived from it.

The secret is shared by all processes of the plane and all its clients. From it come

* the CURVE key pair of the control sockets. The server's public key is as secret as the key itself:
  it is derived, never sent, and a peer that does not know it can't say anything that the server
  decrypts. Control messages are encrypted and authenticated in both directions;
* the proofs (HMAC-SHA256 over fresh nonces of both sides) with which both ends of a bulk connection
  show that they know it. What follows on such a connection is neither encrypted nor authenticated
  byte by byte: see the threat model in the README.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping

import zmq
from zmq.utils import z85

from rl_protocol.support.shared_secret import Secret, SecretSource

KEY_FILE = "RL_TQ_KEY_FILE"
KEY = "RL_TQ_KEY"
_SOURCE = SecretSource(KEY, KEY_FILE, "the data plane", "the plane and all its clients")
HOW_TO_SET = _SOURCE.how_to_set


class PlaneKey(Secret):
    """The secret of a plane, or its absence; never shown.

    >>> PlaneKey(b"x" * 32), bool(PlaneKey(b""))
    (PlaneKey(set), False)
    """

    __slots__ = ()

    def curve_pair(self) -> tuple[bytes, bytes]:
        """Public and secret CURVE key of the plane's servers, in Z85."""
        secret = z85.encode(hmac.digest(self._secret, b"rl-transferqueue curve server", hashlib.sha256))
        return zmq.curve_public(secret), secret

    def protect_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make the socket serve only peers with the key, on endpoints it binds later; no effect
        without a key."""
        if self:
            socket.curve_secretkey = self.curve_pair()[1]
            socket.curve_server = True

    def protect_client(self, socket: zmq.Socket[bytes]) -> None:
        """Require the key from endpoints the socket connects to later; no effect without a key."""
        if self:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = self.curve_pair()[0]


def load_key(environment: Mapping[str, str] = os.environ) -> PlaneKey:
    """Read the key of this process from its environment; empty if there is none.

    Raises:
        ConfigError: the key is too short, or its file can't be read or is open to other users.
    """
    return PlaneKey(_SOURCE.read(environment))
