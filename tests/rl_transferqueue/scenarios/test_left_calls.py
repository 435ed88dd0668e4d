"""Guarantees for calls that are cancelled or time out while the controller is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from polling import until_async

from rl_protocol import BatchData, ColumnSpec, ConflictError, KVBatchMeta, PlaneLostError, PlaneTimeout, dense
from rl_transferqueue import Client, LocalPlane, TransferQueueConfig, connect, connect_blocking, start_local_plane

KEYS = ("a", "b")
ONE = {"num_storage_units": 1, "capacity_mb": 8, "segment_mb": 1}
CONFIGS = {
    "here": TransferQueueConfig(**ONE),
    "tcp": TransferQueueConfig(**ONE, listen="127.0.0.2", shared_memory=False),
}


@pytest.fixture(autouse=True)
def _no_grace(server_grace_s: Callable[[float], None]) -> None:
    """A stopped controller explains no timeout, so clients need not wait for that."""
    server_grace_s(0.0)


@pytest.fixture(scope="module", params=CONFIGS)
def plane(request: pytest.FixtureRequest):
    with start_local_plane(CONFIGS[request.param]) as plane:
        yield plane


def rows(value: int, keys: int = 2, nbytes: int = 8) -> BatchData:
    return BatchData({"x": dense(np.full((keys, nbytes), value, np.uint8))})


@asynccontextmanager
async def stopped(plane: LocalPlane) -> AsyncIterator[None]:
    os.kill(plane.pids[0], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(plane.pids[0], signal.SIGCONT)


async def left(how: str, call: Callable[[float], Coroutine[Any, Any, object]]) -> None:
    """Start a call, and cancel it or let it time out before it is answered."""
    if how == "deadline":
        with pytest.raises(PlaneTimeout):
            await call(0.05)
        return
    task = asyncio.ensure_future(call(60))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def clients(check: Callable[[Client, Client, LocalPlane], Coroutine[Any, Any, None]], plane: LocalPlane) -> None:
    """Run `check` with two clients and the rows `a` and `b`, then check that all memory is free."""

    async def main() -> None:
        async with await connect(plane.descriptor) as first, await connect(plane.descriptor) as other:
            await other.put("p", KEYS, rows(1), tags=[{"n": 1}, {"n": 2}])
            await check(first, other, plane)
        async with await connect(plane.descriptor) as last:
            for partition in (await last.stats()).rows:
                await last.clear(partition)

            async def empty() -> bool:
                stats = await last.stats()
                return stats.bytes_used + stats.bytes_reserved == 0

            await until_async(empty, "all memory comes back")

    asyncio.run(main())


HOW = pytest.mark.parametrize("how", ["cancel", "deadline"])


@HOW
@pytest.mark.parametrize("what", ["claim", "wait_ready"])
def test_rows_of_a_call_that_was_left_are_free_for_others(plane: LocalPlane, how: str, what: str) -> None:
    async def check(first: Client, other: Client, plane: LocalPlane) -> None:
        def take(client: Client, seconds: float) -> Coroutine[Any, Any, object]:
            if what == "claim":
                return client.claim("p", KEYS, task="t", timeout_s=seconds)
            return client.wait_ready("p", count=2, task="t", timeout_s=seconds)

        async with stopped(plane):
            await left(how, lambda seconds: take(first, seconds))
        if plane.descriptor.shared_memory:
            assert (await other.claim("p", KEYS, task="t")).keys == KEYS
        else:
            # Over TCP, another client may be served before the controller learns of the cancel.
            assert (await other.wait_ready("p", count=2, task="t", timeout_s=60)).keys == KEYS
        with pytest.raises(ConflictError):
            await first.claim("p", KEYS, task="t")
        assert (await other.consumption_status("p", task="t")).flags.all()

    clients(check, plane)


@HOW
def test_rows_of_a_call_that_was_left_are_free_although_its_client_was_closed_before_the_answer(
    plane: LocalPlane, how: str
) -> None:
    async def check(first: Client, other: Client, plane: LocalPlane) -> None:
        async with stopped(plane):
            await left(how, lambda seconds: first.claim("p", KEYS, task="t", timeout_s=seconds))
            await first.close(flush_s=0.05)
        await until_async(lambda: one_session(other), "the controller takes notice of the end of the client")
        assert (await other.claim("p", KEYS, task="t")).keys == KEYS

    clients(check, plane)


async def one_session(client: Client) -> bool:
    return (await client.metrics()).sessions == 1


def test_rows_that_a_caller_has_stay_its_own_when_the_client_is_closed(plane: LocalPlane) -> None:
    async def check(first: Client, other: Client, plane: LocalPlane) -> None:
        taken = await first.claim("p", ["a"], task="t")
        call = asyncio.ensure_future(first.claim("p", ["b"], task="t"))
        await asyncio.sleep(0)  # the answer may have arrived, but the call has not returned
        await first.close()
        (got,) = await asyncio.gather(call, return_exceptions=True)
        assert taken.keys == ("a",)
        assert (await other.consumption_status("p", task="t")).flags.tolist() == [True, isinstance(got, KVBatchMeta)]

    clients(check, plane)


def test_rows_that_may_be_handed_out_again_are_not_taken_from_their_next_holder(plane: LocalPlane) -> None:
    """A claim is answered but not received; others reset and claim a row; then it is cancelled."""

    async def check(first: Client, other: Client, plane: LocalPlane) -> None:
        channel, link = first._controller, first._controller._link
        receive, link.receive = link.receive, list  # the answer stays in the socket
        call = asyncio.ensure_future(first.claim("p", KEYS, task="t", timeout_s=30))
        await until_async(lambda: consumed(other), "the claim is served")
        assert await other.reset_consumption("p", task="t", keys=["a"]) == 1
        await other.claim("p", ["a"], task="t")
        call.cancel()
        await asyncio.wait((call,))
        link.receive = receive
        channel._read()
        assert await first.list_rows("p")
        assert (await other.consumption_status("p", task="t")).flags.tolist() == [True, False]

    async def consumed(client: Client) -> bool:
        return bool((await client.consumption_status("p", task="t")).flags.all())

    clients(check, plane)


@HOW
@pytest.mark.parametrize("nbytes", [8, 1 << 20], ids=["from the reserve", "reserved first"])
def test_a_put_that_was_left_is_whole_or_absent_and_comes_before_later_calls(
    plane: LocalPlane, how: str, nbytes: int
) -> None:
    async def check(first: Client, other: Client, plane: LocalPlane) -> None:
        await first.put("p", KEYS, rows(2))  # the client now has a reserve
        async with stopped(plane):
            await left(how, lambda s: first.put("p", ["a", "c"], rows(3, 2, nbytes), tags=[{"n": 3}] * 2, timeout_s=s))
        found = await first.list_rows("p")
        if "c" in found.keys:
            meta = await first.list_rows("p", keys=["a", "c"])
            assert [tag["n"] for tag in meta.tags] == [3, 3]
            assert (await first.get(meta, ["x"])).dense("x").values.tolist() == [[3] * nbytes] * 2
        else:
            assert [tag["n"] for tag in found.tags] == [1, 2]
        meta = await first.put("p", ["a", "c"], rows(4, 2, nbytes), tags=[{"n": 4}] * 2)
        assert (await other.list_rows("p", where={"n": 3})).keys == ()
        assert (await other.get(meta)).dense("x").values.tolist() == [[4] * nbytes] * 2

    clients(check, plane)


@HOW
def test_a_compare_and_set_that_was_left_happened_once_or_not_at_all(plane: LocalPlane, how: str) -> None:
    async def check(first: Client, other: Client, plane: LocalPlane) -> None:
        async with stopped(plane):
            await left(
                how, lambda s: first.put("p", ["a"], tags=[{"n": 9, "by": "first"}], expect=[{"n": 1}], timeout_s=s)
            )
        tags = (await first.list_rows("p", keys=["a"])).tags[0]
        assert tags in ({"n": 9, "by": "first"}, {"n": 1})
        if tags == {"n": 1}:
            await first.put("p", ["a"], tags=[{"n": 9}], expect=[{"n": 1}])
        else:
            with pytest.raises(ConflictError):
                await first.put("p", ["a"], tags=[{"n": 9}], expect=[{"n": 1}])
        assert (await other.list_rows("p", keys=["a"])).tags[0]["n"] == 9

    clients(check, plane)


@HOW
def test_a_clear_and_a_reset_that_were_left_do_not_touch_what_comes_later(plane: LocalPlane, how: str) -> None:
    async def check(first: Client, other: Client, plane: LocalPlane) -> None:
        await first.claim("p", KEYS, task="t")
        async with stopped(plane):
            await left(how, lambda s: first.reset_consumption("p", task="t", timeout_s=s))
            await left(how, lambda s: first.clear("p", ["a"], timeout_s=s))
        await first.put("p", KEYS, rows(5))
        await first.claim("p", [key for key in KEYS if key in await free(other)], task="t")
        await asyncio.sleep(0.05)
        assert (await other.list_rows("p")).keys in (("a", "b"), ("b", "a"))
        assert (await other.consumption_status("p", task="t")).flags.all()

    async def free(client: Client) -> tuple[str, ...]:
        return (await client.list_rows("p", task="t")).keys

    clients(check, plane)


@HOW
def test_reads_that_were_left_hold_nothing(plane: LocalPlane, how: str) -> None:
    """A get, a list, an alloc and a watch; `clients` checks that all memory is free afterwards."""

    async def check(first: Client, other: Client, plane: LocalPlane) -> None:
        column = [ColumnSpec(name="x", kind="dense", dtype="uint8")]
        meta = await first.list_rows("p")
        since = (await first.watch("p", timeout_s=60)).version
        async with stopped(plane):
            await left(how, lambda s: first.get(meta, ["x"], timeout_s=s))
            await left(how, lambda s: first.list_rows("p", timeout_s=s))
            await left(how, lambda s: first.alloc(column, 1 << 20, timeout_s=s))
            await left(how, lambda s: first.watch("p", since=since, timeout_s=s))
        await other.clear("p")
        assert (await first.metrics()).waiting == 0

    clients(check, plane)


@HOW
def test_a_connect_that_was_left_leaves_no_session(plane: LocalPlane, how: str) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            async with stopped(plane):
                await left(how, lambda s: connect(plane.descriptor, timeout_s=s))
            await until_async(lambda: one_session(client), "the session ends")

    asyncio.run(main())


DYING = """
import asyncio, os, signal, sys
from rl_transferqueue import PlaneDescriptor, connect

async def main():
    client = await connect(PlaneDescriptor.from_json(sys.argv[1]))
    await client.claim("p", ["a"], task="t")
    await client.list_rows("p")
    asyncio.ensure_future(client.claim("p", ["b"], task="t"))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_rows_handed_to_a_client_that_died_are_its_own_once_it_said_anything_after(plane: LocalPlane) -> None:
    """`a` was certainly received. `b` may not have been, so it is handed out again."""

    async def check(first: Client, other: Client, plane: LocalPlane) -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", DYING, plane.descriptor.to_json())
        await process.wait()
        assert (await other.wait_ready("p", count=1, task="t", timeout_s=60)).keys == ("b",)
        assert (await other.consumption_status("p", task="t")).flags.all()

    clients(check, plane)


# --------------------------------------------------------------------------------
# Closing
def test_calls_under_way_say_that_their_client_was_closed(plane: LocalPlane) -> None:
    async def check(first: Client, other: Client, plane: LocalPlane) -> None:
        full = rows(1, 1, 6 << 20)
        await other.put("full", ["f"], full)
        calls = [
            first.wait_ready("p", count=9, task="t", timeout_s=60),
            first.put("full", ["g"], full, timeout_s=60),
            first.watch("p", since=(await first.watch("p", timeout_s=60)).version, timeout_s=60),
        ]
        async with stopped(plane):
            calls += [first.claim("p", KEYS, task="t"), first.list_rows("p"), first.clear("p"), first.stats()]
            running = [asyncio.ensure_future(call) for call in calls]
            await asyncio.sleep(0.1)
            await first.close(flush_s=0.05)
            for call in running:
                with pytest.raises(PlaneLostError, match="client is closed"):
                    await call
        for again in (first.list_rows("p"), first.put("p", ["z"], rows(1, 1)), first.claim("p", ["a"], task="t")):
            with pytest.raises(PlaneLostError, match="client is closed"):
                await again

    clients(check, plane)


def test_a_call_after_close_is_refused_at_once_although_views_are_still_held(plane: LocalPlane) -> None:
    async def check(first: Client, other: Client, plane: LocalPlane) -> None:
        view = await first.get(await first.list_rows("p"), ["x"])
        await first.close()
        for again in (first.list_rows("p", timeout_s=600), first.get(await other.list_rows("p"), ["x"], timeout_s=600)):
            with pytest.raises(PlaneLostError, match="client is closed"):
                await asyncio.wait_for(again, 60)
        assert view.dense("x").values.all()
        del view

    clients(check, plane)


def test_close_ends_the_blocking_calls_of_other_threads(plane: LocalPlane) -> None:
    client = connect_blocking(plane.descriptor)
    since = client.watch("p", timeout_s=60).version
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(client.wait_ready, "p", count=9, timeout_s=60)
        watching = threads.submit(client.watch, "q", since=since + 1, timeout_s=60)
        deadline = time.monotonic() + 60
        while client_waits(client) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        client.close()
        for call in (waiting, watching):
            with pytest.raises(PlaneLostError, match="client is closed"):
                call.result(60)


def client_waits(client: Any) -> int:
    return len(client.close.__wrapped__.__self__._controller._pending)
