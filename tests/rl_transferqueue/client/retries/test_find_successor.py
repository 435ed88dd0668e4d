"""Wait for the descriptor of a plane to name a later controller."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from rl_protocol import PlaneLostError
from rl_transferqueue.client.deadline import deadline_after
from rl_transferqueue.client.retries import find_successor as module
from rl_transferqueue.client.retries.find_successor import find_successor
from rl_transferqueue.wire.descriptor import ControllerAddress, PlaneDescriptor
from rl_transferqueue.wire.process_liveness import this_process


def plane(file: Path, incarnation: int) -> PlaneDescriptor:
    controller = ControllerAddress("unix:/c", this_process(), 3, 4096, incarnation=incarnation)
    return PlaneDescriptor(controller, (), "host", True, "plane", "simple", "", 60.0, 0, str(file), 5.0)


def test_a_later_controller_is_found_once_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "plane.json"
    old, new = plane(file, 2), plane(file, 4)

    async def main() -> None:
        old.save(file)
        search = asyncio.create_task(find_successor(old, deadline_after(60)))
        await asyncio.sleep(0.1)
        assert not search.done()
        new.save(file)
        assert await search == new
        assert await find_successor(msgspec.structs.replace(old), deadline_after(0)) == new

    asyncio.run(main())


def test_there_is_none_at_the_deadline_or_when_the_plane_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = plane(tmp_path / "plane.json", 1)
    with pytest.raises(PlaneLostError, match=r"has ended: .*can't be read"):
        asyncio.run(find_successor(old, deadline_after(60)))
    old.save(Path(old.file))
    with pytest.raises(PlaneLostError, match=r"no successor was there within 5 s"):
        asyncio.run(find_successor(old, deadline_after(0.05)))
    monkeypatch.setattr(module, "_END_S", 0.05)
    with pytest.raises(PlaneLostError, match="has ended the connection; its log"):
        asyncio.run(find_successor(old, deadline_after(60), lambda: True))
