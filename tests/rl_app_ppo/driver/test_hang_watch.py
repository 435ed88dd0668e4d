"""The watch over a run ends it whether or not its report can be written."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rl_app_ppo.driver import hang_watch as watch
from rl_app_ppo.driver.hang_watch import hang_watch
from rl_app_ppo.outputs.run_folder import RunFiles
from rl_app_ppo.watchdog.unanswered_calls import CallLog
from rl_protocol import HangError


@pytest.mark.parametrize("writable", [True, False])
def test_a_report_that_can_not_be_written_is_printed_and_ends_the_run(tmp_path, monkeypatch, writable):
    monkeypatch.setattr(watch, "free_cpus", lambda: "1 of 1 are free")
    files, printed = RunFiles(folder=tmp_path), list[str]()
    files.logs.mkdir()
    if not writable:
        files.hang.mkdir()  # in place of a full disk
    pool: Any = SimpleNamespace(calls=CallLog(), pids=dict, hung=None, cpus_needed=1.0)
    screen: Any = SimpleNamespace(note=printed.append)

    async def main() -> None:
        async with hang_watch(0.3, pool, {}, {}, files, screen):
            await asyncio.wait_for(asyncio.Event().wait(), 60)

    where = (
        "of all processes: .*hang.txt$"
        if writable
        else "are above; What the run puts out can't be written to .*hang.txt"
    )
    with pytest.raises(HangError, match=f"(?s)^Nothing has moved for 0.3 s .*The stacks {where}"):
        asyncio.run(main())
    assert "=== tasks of the driver" in printed[0]
