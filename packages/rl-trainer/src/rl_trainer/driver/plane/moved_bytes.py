"""Bytes that the data plane moves in each step, and those that it finds damaged."""

from __future__ import annotations

from rl_protocol.ports import DataPlane


class MovedBytes:
    """Counts the bytes of a data plane by link (`PlaneStats.links`) as metrics of a step.

    Args:
        plane: the data plane.
    """

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._links: dict[str, int] = {}
        self._damaged = 0

    async def read(self) -> dict[str, float]:
        """Bytes since the call before, by metric; and the blocks found damaged, if there are any.

        Raises:
            PlaneTimeout, PlaneLostError: the data plane does not answer.
        """
        stats = await self._plane.stats()
        before, self._links = self._links, dict(stats.links)
        moved = {f"transfer_queue/bytes_{link}": float(n - before.get(link, 0)) for link, n in self._links.items()}
        damaged, self._damaged = stats.damaged - self._damaged, stats.damaged
        return moved | ({"transfer_queue/damaged_blocks": float(damaged)} if damaged else {})
