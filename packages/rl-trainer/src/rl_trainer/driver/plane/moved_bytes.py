"""Bytes that the data plane moves in each step."""

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

    async def read(self) -> dict[str, float]:
        """Bytes since the call before, by metric.

        Raises:
            PlaneTimeout, PlaneLostError: the data plane does not answer.
        """
        before, self._links = self._links, dict((await self._plane.stats()).links)
        return {f"transfer_queue/bytes_{link}": float(n - before.get(link, 0)) for link, n in self._links.items()}
