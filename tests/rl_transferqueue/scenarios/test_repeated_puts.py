"""A put whose answer does not arrive is repeated, and happens once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polling import until_async

from rl_protocol import BatchData, BatchError, ConflictError, PlaneTimeout, dense
from rl_transferqueue import Client, LocalPlane, PutTimeout, TransferQueueConfig, connect, start_local_plane
from rl_transferqueue.controller.put_answers import KEPT
from rl_transferqueue.wire.messages import Commit, Committed, Recalled, Reply

SMALL = {"num_storage_units": 1, "capacity_mb": 8, "segment_mb": 1}


@pytest.fixture(scope="module", params=["off", "commit", "tcp"])
def plane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPlane]:
    more: dict[str, Any] = {}
    if request.param == "tcp":
        more = {"listen": "127.0.0.2", "shared_memory": False}
    elif request.param == "commit":
        more = {"durability": "commit", "journal_dir": str(tmp_path_factory.mktemp("plane") / "journal")}
    with start_local_plane(TransferQueueConfig(**SMALL, **more)) as plane:
        yield plane


@dataclass(frozen=True)
class Put:
    """A put of one row, and how many of its answers get lost."""

    key: str
    value: int
    expect: int | None
    """Value that the row must have; -1: any; None: the row must not exist."""
    data: bool
    lost: int


PUTS = st.builds(
    Put,
    key=st.sampled_from("ab"),
    value=st.integers(0, 2),
    expect=st.sampled_from([None, -1, 0, 1, 2]),
    data=st.booleans(),
    lost=st.integers(0, 2),
)


def lose_answers(client: Client) -> Callable[[int], None]:
    """Returns a function that sets how many of the next answers to puts are lost, each at the
    moment at which the deadline of its call passes."""
    channel, left = client._controller, 0
    take = channel._take

    def lossy(reply: Reply) -> None:
        nonlocal left
        call = channel._pending.get(reply.id)
        if left and call is not None and isinstance(reply.body, Committed | Recalled):
            left -= 1
            call.answer.set_result(None)
        else:
            take(reply)

    def lose(count: int) -> None:
        nonlocal left
        left = count

    channel._take = lossy  # type: ignore[method-assign]
    return lose


async def run(client: Client, partition: str, puts: list[Put], lose: Callable[[int], None]) -> list[object]:
    """What the puts returned, and the rows at the end."""
    found: list[object] = []
    for put in puts:
        lose(put.lost)
        late: PutTimeout | None = None
        while True:
            data = BatchData({"x": dense(np.array([put.value]))}) if put.data else None
            expect = None if put.expect == -1 else [None if put.expect is None else {"n": put.expect}]
            try:
                meta = await client.put(partition, [put.key], data, tags=[{"n": put.value}], expect=expect, again=late)
            except PutTimeout as error:
                late = error
            except ConflictError:
                found.append("conflict")
                break
            else:
                found.append((meta.keys, meta.tags, len(meta.generations)))
                break
    rows = await client.list_rows(partition)
    found += [rows.keys, rows.tags]
    whole = await client.list_rows(partition, fields=["x"])
    return [*found, whole.keys, (await client.get(whole, ["x"])).dense("x").values.tolist() if whole else []]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(puts=st.lists(PUTS, max_size=8))
def test_puts_with_lost_answers_end_as_if_none_was_lost(plane: LocalPlane, puts: list[Put]) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client, await connect(plane.descriptor) as other:
            disturbed = await run(client, "disturbed", puts, lose_answers(client))
            assert disturbed == await run(other, "undisturbed", puts, lambda _: None)
            assert await client.clear("disturbed") == await other.clear("undisturbed")

    asyncio.run(main())


def test_a_compare_and_set_that_times_out_at_a_stopped_controller_is_made_once(
    plane: LocalPlane, server_grace_s: Callable[[float], None]
) -> None:
    server_grace_s(0.0)

    async def main() -> None:
        async with await connect(plane.descriptor) as client, await connect(plane.descriptor) as other:
            await client.put("p", ["a"], tags=[{"n": 1}])
            swap: dict[str, Any] = {"tags": [{"n": 2}], "expect": [{"n": 1}]}
            os.kill(plane.pids[0], signal.SIGSTOP)
            try:
                with pytest.raises(PutTimeout) as first:
                    await client.put("p", ["a"], **swap, timeout_s=0.05)
                with pytest.raises(PutTimeout) as second:
                    await client.put("p", ["a"], **swap, timeout_s=0.05, again=first.value)
            finally:
                os.kill(plane.pids[0], signal.SIGCONT)
            assert second.value.request == first.value.request
            found = await client.put("p", ["a"], **swap, again=second.value)
            assert found.generations == (await other.list_rows("p")).generations
            with pytest.raises(ConflictError):
                await client.put("p", ["a"], **swap)
            with pytest.raises(BatchError, match="another one"):
                await other.put("p", ["a"], **swap, again=second.value)
            await client.clear("p")

    asyncio.run(main())


def test_a_put_that_was_left_reserves_no_memory_for_later_ones(plane: LocalPlane) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:

            async def commits() -> bool:
                return any(isinstance(call.body, Commit) for call in client._controller._pending.values())

            async def nothing_is_reserved() -> bool:
                client._writer.give_back_reserve()
                return not (await client.stats()).bytes_reserved

            await client.put("left", ["a"], BatchData({"x": dense(np.zeros(1))}))  # reserves 64 KiB ahead
            os.kill(plane.pids[0], signal.SIGSTOP)
            try:
                putting = asyncio.create_task(client.put("left", ["b"], BatchData({"x": dense(np.zeros((1, 5000)))})))
                await until_async(commits, "the put is sent")
                putting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await putting
            finally:
                os.kill(plane.pids[0], signal.SIGCONT)
            assert (await client.wait_ready("left", count=2, fields=["x"], timeout_s=60)).keys == ("a", "b")
            await until_async(nothing_is_reserved, "all memory that is reserved is the client's to give back")
            await client.clear("left")

    asyncio.run(main())


def test_an_answer_is_kept_for_a_number_of_puts(plane: LocalPlane) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            lose = lose_answers(client)
            lose(1)
            with pytest.raises(PutTimeout) as late:
                await client.put("p", ["a"], tags=[{"n": 1}], expect=[None])
            for _ in range(KEPT - 1):
                await client.put("p", ["b"], tags=[{"n": 1}])
            assert (await client.put("p", ["a"], tags=[{"n": 1}], expect=[None], again=late.value)).keys == ("a",)
            await client.put("p", ["b"], tags=[{"n": 1}])
            with pytest.raises(Exception, match="not known any more"):
                await client.put("p", ["a"], tags=[{"n": 1}], expect=[None], again=late.value)
            assert isinstance(late.value, PlaneTimeout)
            await client.clear("p")

    asyncio.run(main())
