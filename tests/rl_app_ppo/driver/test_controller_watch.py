"""The controller of a real data plane is killed and replaced, as often as the policy allows."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rl_app_ppo.cluster.heartbeats import Watched
from rl_app_ppo.cluster.hung_processes import HungProcesses
from rl_app_ppo.config.restart import RestartConfig
from rl_app_ppo.driver.controller_watch import CONTROLLER, controller_watch, successor_s
from rl_app_ppo.driver.restart_policy import RestartPolicy
from rl_protocol import PlaneLostError
from rl_protocol.support.host.portable import uses_linux
from rl_transferqueue import LocalPlane, TransferQueueConfig, connect, start_local_plane


def policy(limit: int) -> RestartPolicy:
    return RestartPolicy(RestartConfig(max_per_hour=limit, backoff_s=0.0))


def settings(folder: Path) -> TransferQueueConfig:
    """Clients use the network, as those of other hosts."""
    return TransferQueueConfig(
        listen="127.0.0.1",
        shared_memory=False,
        num_storage_units=1,
        capacity_mb=8,
        segment_mb=1,
        durability="commit",
        journal_dir=str(folder / "journal"),
    )


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[LocalPlane]:
    with start_local_plane(settings(tmp_path), successor_s=600.0) as plane:
        yield plane


def test_a_killed_controller_is_replaced_until_the_limit_and_then_calls_fail(plane: LocalPlane) -> None:
    said: list[str] = []

    async def main() -> None:
        first = plane.pids[0]
        name = f"{CONTROLLER} on node1"
        servers = {first: name, 1: "another"}
        replaced, hung = asyncio.Event(), HungProcesses()

        def say(line: str) -> None:
            said.append(line)
            if "serves" in line:
                replaced.set()

        async with (
            controller_watch(plane, servers, policy(1), hung, say),
            await connect(plane.descriptor) as client,
        ):
            await client.put("p", ["a"], tags=[{"n": 1}])
            os.kill(first, signal.SIGKILL)
            assert (await client.list_rows("p", timeout_s=120)).tags == ({"n": 1},)
            await asyncio.wait_for(replaced.wait(), 60)
            second = plane.pids[0]
            assert servers == {1: "another", second: name}
            hung.add(Watched(CONTROLLER, second, Path("beat")), 60.0)
            os.kill(second, signal.SIGKILL)
            with pytest.raises(PlaneLostError, match="has ended"):
                await client.list_rows("p", timeout_s=120)
        killed = "was killed by SIGKILL" if uses_linux() else "has ended"
        hung_end = "hung for 60 s (restart.heartbeat_s) and was therefore killed"
        assert said == [
            f"{name} (process {first}) {killed}: it alone is started again (restart 1 of at most 1 an hour, in 0 s)",
            f"data plane: the new controller (process {second}) serves, with the rows of the journal",
            f"{name} (process {second}) {hung_end} and is not started again: the data plane's controller was restarted 1 time within an "
            "hour, as often as restart.max_per_hour=1 allows.",
        ]

    asyncio.run(main())


def test_one_that_does_not_start_is_started_again(plane: LocalPlane) -> None:
    """Another process has its port for a while."""
    said: list[str] = []
    port = int(plane.descriptor.controller.control.rpartition(":")[2])

    async def main() -> None:
        replaced = asyncio.Event()
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

            def say(line: str) -> None:
                said.append(line)
                if "restart 1 of" in line:
                    other.bind(("127.0.0.1", port))
                    other.listen()
                elif "restart 2 of" in line:
                    other.close()
                elif "serves" in line:
                    replaced.set()

            async with (
                controller_watch(plane, {}, policy(3), HungProcesses(), say),
                await connect(plane.descriptor) as client,
            ):
                await client.put("p", ["a"], tags=[{"n": 1}])
                os.kill(plane.pids[0], signal.SIGKILL)
                await asyncio.wait_for(replaced.wait(), 120)
                assert (await client.list_rows("p", timeout_s=120)).tags == ({"n": 1},)

    asyncio.run(main())
    first, why, second, serves = said
    assert "(restart 1 of at most 3 an hour, in 0 s)" in first
    assert f"can't listen at 127.0.0.1, ports ({port}, " in why
    assert second == f"{CONTROLLER} did not start: it alone is started again (restart 2 of at most 3 an hour, in 0 s)"
    assert "serves" in serves


def test_a_watch_that_ends_during_a_restart_leaves_a_plane_that_can_be_closed(plane: LocalPlane) -> None:
    async def main() -> None:
        began = asyncio.Event()

        def say(line: str) -> None:
            began.set()

        async with controller_watch(plane, {}, policy(1), HungProcesses(), say):
            os.kill(plane.pids[0], signal.SIGKILL)
            await began.wait()
            await asyncio.sleep(0)

    asyncio.run(main())
    plane.close()


def test_a_controller_with_a_journal_is_replaced_also_where_it_serves_other_hosts(tmp_path: Path) -> None:
    durable = settings(tmp_path)
    assert successor_s(durable, policy(1)) > 0
    assert successor_s(durable, policy(0)) == 0
    assert successor_s(durable, None) == 0
    assert successor_s(replace(durable, listen="127.0.0.1"), policy(1)) > 0
    assert successor_s(TransferQueueConfig(), policy(1)) == 0
