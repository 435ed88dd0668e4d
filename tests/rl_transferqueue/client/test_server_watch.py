"""`ServerWatch`: which process exits it reports, and when the plane is lost."""

from __future__ import annotations

import asyncio
import os

from rl_transferqueue.client.server_watch import CONTROLLER, ServerWatch


def test_the_plane_runs_until_its_controller_or_its_last_unit_ends() -> None:
    async def main() -> None:
        ended: asyncio.Queue[tuple[str, int | None]] = asyncio.Queue()
        watch = ServerWatch(asyncio.get_running_loop(), lambda name, unit: ended.put_nowait((name, unit)))
        writers: dict[str, int] = {}
        for name, unit in ((CONTROLLER, None), ("storage unit 0", 0), ("storage unit 1", 1)):
            lifeline, writers[name] = os.pipe()
            watch.add(name, lifeline, unit)
        assert watch.plane_runs
        os.close(writers["storage unit 0"])
        assert await ended.get() == ("storage unit 0", 0)
        assert watch.plane_runs
        os.close(writers["storage unit 1"])
        assert await ended.get() == ("storage unit 1", 1)
        assert (watch.any_unit_runs, watch.plane_runs) == (False, False)
        os.close(writers[CONTROLLER])
        assert await ended.get() == (CONTROLLER, None)

    asyncio.run(main())


def test_close_stops_watching() -> None:
    async def main() -> None:
        ended: list[str] = []
        watch = ServerWatch(asyncio.get_running_loop(), lambda name, unit: ended.append(name))
        lifeline, writer = os.pipe()
        watch.add(CONTROLLER, lifeline)
        watch.close()
        os.close(writer)
        await asyncio.sleep(0)
        assert (ended, watch.plane_runs) == ([], False)

    asyncio.run(main())
