"""Admission control: whether new requests start, wait or fail."""

from __future__ import annotations

import asyncio

from rl_protocol.errors import RolloutError


class AdmissionControl:
    """Admits requests unless it is closed or has failed. Used on one event loop.

    It can be closed for several reasons at once, each with a name and a text for error messages.
    """

    def __init__(self) -> None:
        self._closed: dict[str, str] = {}
        self._error: RolloutError | None = None
        self._change = asyncio.Event()

    def would_admit_without(self, name: str) -> bool:
        """Return whether requests would be admitted if this reason to be closed were gone."""
        return self._error is None and self._closed.keys() <= {name}

    def close(self, name: str, reason: str) -> None:
        """Let requests wait for this reason. Closing twice under the same name counts once."""
        self._closed[name] = reason

    def reopen(self, name: str) -> None:
        """Remove a reason to be closed."""
        self._closed.pop(name, None)
        self._wake()

    def fail(self, error: RolloutError) -> None:
        """Make all requests fail with this error, waiting ones too, until `recover`."""
        self._error = error
        self._wake()

    def recover(self) -> None:
        """Undo `fail`."""
        self._error = None
        self._wake()

    async def enter(self, timeout_s: float) -> None:
        """Wait until requests are admitted.

        Raises:
            RolloutError: admission failed, or stayed closed until the deadline; says why.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._closed or self._error is not None:
                    if self._error is not None:
                        raise type(self._error)(str(self._error))
                    await self._change.wait()
        except TimeoutError as error:
            raise RolloutError(
                f"No request was admitted for {timeout_s:g} s: {'; '.join(self._closed.values())}."
            ) from error

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
