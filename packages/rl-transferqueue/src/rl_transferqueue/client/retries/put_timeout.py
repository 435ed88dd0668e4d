"""The error of a put that was not answered in time."""

from __future__ import annotations

from rl_protocol.errors import PlaneTimeout


class PutTimeout(PlaneTimeout):
    """The deadline of a put passed before it was answered: it may have been made or not.

    `Client.put(again=error)` finds out. A put that fails with another PlaneTimeout was not made.

    Attributes:
        session: identity of the client's session.
        request: number of the put in that session.
    """

    session: bytes
    request: int
