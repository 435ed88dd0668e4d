"""Base class of the conformance suites of the DataPlane port."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from rl_protocol.ports import DataPlane


class DataPlaneSuiteBase:
    """Subclass and override `open_plane`; every test opens a fresh, empty plane."""

    def open_plane(self) -> AbstractAsyncContextManager[DataPlane]:
        """An empty plane, released when the context ends."""
        raise NotImplementedError

    def run(self, body: Callable[[DataPlane], Awaitable[None]]) -> None:
        """Open a plane and run a test body on it."""

        async def main() -> None:
            async with self.open_plane() as plane:
                await asyncio.wait_for(body(plane), 60)

        asyncio.run(main())
