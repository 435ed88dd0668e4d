"""The client's side of bulk connections: blocking calls with deadlines, for worker threads."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from rl_protocol.errors import UNREADABLE, ConfigError, PlaneLostError, PlaneTimeout, WireError
from rl_protocol.support.host.tcp_peers import notice_dead_peer
from rl_transferqueue.transport.addresses import split_endpoint
from rl_transferqueue.transport.bulk_protocol import (
    CHUNK,
    GREETING_BYTES,
    MAGIC,
    VERDICT_BYTES,
    BulkAnswer,
    Outgoing,
    Refused,
    Sending,
    Written,
    as_lifeline,
    client_proof,
    frame_length,
    server_proof,
)
from rl_transferqueue.transport.plane_secret import HOW_TO_SET, PlaneKey
from rl_transferqueue.wire.descriptor import ControllerAddress, UnitAddress
from rl_transferqueue.wire.failures import error_of
from rl_transferqueue.wire.messages import Failure

A = TypeVar("A", Written, Sending)
_decoder = msgspec.msgpack.Decoder[BulkAnswer](BulkAnswer)


class IncarnationEnded(PlaneLostError):
    """A storage unit refuses a request: the controller that gave the memory has a successor."""


class BulkConnection:
    """One connection after the handshake; used by one thread at a time."""

    def __init__(self, peer: socket.socket, name: str, deadline: float) -> None:
        self._peer = peer
        self._name = name
        self._deadline = deadline

    def until(self, deadline: float) -> None:
        """Deadline of the calls from here on, in seconds of time.monotonic."""
        self._deadline = deadline

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        outgoing = Outgoing(parts)
        with self._failing():
            while outgoing:
                self._bound()
                outgoing.send(self._peer)

    def receive(self, target: memoryview) -> None:
        """Fill it."""
        with self._failing():
            while target:
                self._bound()
                got = self._peer.recv_into(target[:CHUNK])
                if not got:
                    raise ConnectionResetError("closed by the other side")
                target = target[got:]

    def receive_bytes(self, count: int) -> bytes:
        data = bytearray(count)
        self.receive(memoryview(data))
        return bytes(data)

    def expect(self, kind: type[A]) -> A:
        """The next answer, which must be of that kind.

        Raises:
            IncarnationEnded: the memory belongs to a later controller.
            The error that the server answered.
        """
        packed = self.receive_bytes(frame_length(self.receive_bytes(4)))
        try:
            answer = _decoder.decode(packed)
        except UNREADABLE as error:
            raise WireError(f"The {self._name} of the data plane speaks another protocol: {error}.") from error
        if isinstance(answer, Failure):
            raise error_of(answer)
        if isinstance(answer, Refused):
            raise IncarnationEnded(
                f"The {self._name} of the data plane serves controller {answer.incarnation}, a successor of this client's."
            )
        if not isinstance(answer, kind):
            raise WireError(f"The {self._name} answered {type(answer).__name__} where {kind.__name__} was expected.")
        return answer

    def lifeline(self) -> int:
        """Turn the connection into a lifeline; the caller owns the returned file descriptor."""
        return as_lifeline(self._peer)

    def interrupt(self) -> None:
        """Make the thread that uses it fail at once; from any thread."""
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._peer.close()

    def _bound(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._peer.settimeout(left)

    @contextmanager
    def _failing(self) -> Generator[None]:
        try:
            yield
        except TimeoutError:
            raise PlaneTimeout(
                f"The {self._name} of the data plane did not move all bytes before the deadline."
            ) from None
        except OSError as error:
            raise PlaneLostError(f"The connection to the {self._name} of the data plane broke: {error}.") from error


def dial(
    server: ControllerAddress | UnitAddress, host: str, name: str, key: PlaneKey, session: bytes, timeout_s: float
) -> BulkConnection:
    """Connect to a process of the plane on `host` and shake hands.

    Raises:
        PlaneLostError: no process listens there, or another one than expected.
        ConfigError: the keys differ.
        PlaneTimeout: no answer in time.
    """
    where = f"The {name} of the data plane at {server.bulk}"
    deadline = time.monotonic() + timeout_s
    try:
        peer = socket.create_connection(split_endpoint(server.bulk), timeout=max(timeout_s, 0.001))
    except TimeoutError:
        raise PlaneTimeout(f"{where} did not answer within {round(timeout_s, 3):g} s.") from None
    except OSError as error:
        raise PlaneLostError(f"{where} can't be reached, or does not run any more: {error}.") from error
    notice_dead_peer(peer)
    connection = BulkConnection(peer, name, deadline)
    try:
        greeting = connection.receive_bytes(GREETING_BYTES)
        if not greeting.startswith(MAGIC):
            raise WireError(f"{where} speaks another protocol; it greets with {greeting[:4]!r}, not {MAGIC!r}.")
        mine = os.urandom(GREETING_BYTES - len(MAGIC))
        identity = (key, host, server.process, greeting[len(MAGIC) :] + mine, session)
        connection.send([session + mine + client_proof(*identity)])
        verdict = connection.receive_bytes(VERDICT_BYTES)
        if not hmac.compare_digest(verdict, b"\x01" + server_proof(*identity)):
            raise ConfigError(
                f"{where} refuses this client, which has {'another key' if key else 'no key'}, or it is not the process that the descriptor "
                f"names: {HOW_TO_SET}."
            )
    except BaseException:
        connection.close()
        raise
    return connection
