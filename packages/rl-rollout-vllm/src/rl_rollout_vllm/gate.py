"""Admission: requests pass while nobody holds the gate."""

from __future__ import annotations

import asyncio

from rl_protocol.errors import RolloutError


class Gate:
    """Open while nothing holds it. A hold has a name, and a reason that those who may not wait are told; used on one event loop."""

    def __init__(self) -> None:
        self._holds: dict[str, str] = {}
        self._broken: RolloutError | None = None
        self._change = asyncio.Event()

    def opens_without(self, name: str) -> bool:
        """Whether a request would pass if this hold were given up."""
        return self._broken is None and self._holds.keys() <= {name}

    def hold(self, name: str, reason: str) -> None:
        """Close it; the same name twice is one hold."""
        self._holds[name] = reason

    def release(self, name: str) -> None:
        """Give one hold up."""
        self._holds.pop(name, None)
        self._wake()

    def break_(self, error: RolloutError) -> None:
        """Refuse everybody, those who wait too, with this error, until `mend`."""
        self._broken = error
        self._wake()

    def mend(self) -> None:
        """What was broken is whole again."""
        self._broken = None
        self._wake()

    async def enter(self, timeout_s: float) -> None:
        """Wait until it is open.

        Raises:
            RolloutError: it is broken, or stayed closed until the deadline; says why.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._holds or self._broken is not None:
                    if self._broken is not None:
                        raise type(self._broken)(str(self._broken))
                    await self._change.wait()
        except TimeoutError as error:
            raise RolloutError(
                f"No request was admitted for {timeout_s:g} s: {'; '.join(self._holds.values())}."
            ) from error

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
