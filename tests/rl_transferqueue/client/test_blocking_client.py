"""`BlockingPlane`, its portal, and leases that are released in any thread."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import in_a_fork

from rl_protocol import BatchData, MissingDataError, PlaneLostError, PlaneTimeout, dense
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_transferqueue import BlockingPlane, LocalPlane, Portal, connect, connect_blocking, portal
from rl_transferqueue.client import blocking_client


def test_every_method_works_without_async(plane: LocalPlane) -> None:
    client = connect_blocking(plane.descriptor)
    meta = client.put("p", ["a", "b"], BatchData({"x": dense([1, 2])}), tags=[{"n": 1}, {"n": 2}])
    assert client.get(meta).dense("x").values.tolist() == [1, 2]
    assert client.wait_ready("p", count=1, where={"n": 2}, timeout_s=60).keys == ("b",)
    assert client.list_rows("p").keys == ("a", "b")
    assert client.stats().rows == {"p": 2}
    assert client.traffic().data_read == 16
    assert client.clear("p") == 2
    with pytest.raises(MissingDataError):
        client.get(meta)
    with pytest.raises(PlaneTimeout):
        client.wait_ready("p", count=1, timeout_s=0.01)
    client.close()
    client.close()


def test_with_closes_the_client_as_async_with_does(plane: LocalPlane) -> None:
    with connect_blocking(plane.descriptor) as client:
        assert client.list_rows("p").keys == ()
    with pytest.raises(PlaneLostError, match="closed"):
        client.list_rows("p")


def test_any_data_plane_can_be_made_blocking() -> None:
    own = Portal()
    blocking = BlockingPlane(MemoryDataPlane(), own)
    blocking.put("p", ["a"], tags=[{"n": 1}])
    assert blocking.list_rows("p").tags == ({"n": 1},)
    own.close()


def test_pickling_a_plane_says_what_to_send_instead() -> None:
    own = Portal()
    with pytest.raises(TypeError, match="Send its PlaneDescriptor and call connect_blocking there"):
        pickle.dumps(BlockingPlane(MemoryDataPlane(), own))
    own.close()


def test_many_threads_share_one_portal(plane: LocalPlane) -> None:
    client = connect_blocking(plane.descriptor)
    assert portal() is portal()

    def work(number: int) -> None:
        for i in range(10):
            meta = client.put("p", [f"{number}-{i}"], BatchData({"x": dense([number * 100 + i])}))
            assert client.get(meta).dense("x").values[0] == number * 100 + i

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(client.list_rows("p")) == 40
    client.close()


def test_many_blocking_calls_open_no_descriptors_and_start_no_threads(plane: LocalPlane) -> None:
    """One loop and one thread serve the whole process."""
    client = connect_blocking(plane.descriptor)

    def calls(count: int) -> tuple[int, int]:
        for i in range(count):
            meta = client.put("p", [f"k{i % 7}"], BatchData({"x": dense([i])}), tags=[{"n": i}])
            assert client.get(meta).dense("x").values[0] == i
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    descriptors, threads = calls(5)
    more_descriptors, more_threads = calls(300)
    assert more_descriptors <= descriptors  # fewer if earlier tests' objects are freed
    assert more_threads <= threads
    client.close()


def test_a_blocking_call_in_the_portals_thread_is_refused() -> None:
    async def inner() -> None:
        portal().run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="would deadlock"):
        portal().run(inner())


def test_closing_a_portal_cancels_its_calls() -> None:
    own = Portal()
    seen: list[BaseException] = []

    def wait() -> None:
        try:
            own.run(asyncio.sleep(60))
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    own.close()
    thread.join(60)
    assert len(seen) == 1


def test_closing_a_portal_does_not_wait_for_a_call_that_ignores_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_transferqueue.client.blocking_client.CLOSE_S", 0.1)
    own, asked = Portal(), threading.Event()

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                asked.set()

    # Only the wait for the call is short: the thread, which ends without it, may take its time.
    join = own._thread.join
    monkeypatch.setattr(own._thread, "join", lambda timeout: join(60))
    own.submit(stubborn())
    own.close()
    assert asked.is_set()
    assert not any(thread is own._thread for thread in threading.enumerate())


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_fork_while_another_thread_starts_the_portal_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    process, starts, ends = os.getpid(), threading.Event(), threading.Event()

    def start() -> str:
        if os.getpid() == process:
            starts.set()
            assert ends.wait(60)
        return f"portal of {os.getpid() == process}"

    monkeypatch.setattr(blocking_client, "Portal", start)
    monkeypatch.setattr(blocking_client, "_portals", {})
    thread = threading.Thread(target=portal)
    thread.start()
    try:
        assert starts.wait(60)
        assert in_a_fork(portal) == "'portal of False'"
    finally:
        ends.set()
        thread.join(60)


AFTER_FORK = "PlaneLostError: A client of the data plane does not survive a fork; connect again in this process."


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_blocking_client_says_that_it_does_not_survive_a_fork(plane: LocalPlane) -> None:
    client = connect_blocking(plane.descriptor)
    client.put("a", ["k"], BatchData({"x": dense([1])}))
    assert in_a_fork(lambda: client.list_rows("a", timeout_s=3)) == AFTER_FORK
    assert in_a_fork(client.close) == AFTER_FORK
    assert in_a_fork(lambda: connect_blocking(plane.descriptor).list_rows("a").keys) == "('k',)"
    assert client.list_rows("a").keys == ("k",)
    client.close()


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_an_async_client_says_that_it_does_not_survive_a_fork(plane: LocalPlane) -> None:
    async def body() -> None:
        async with await connect(plane.descriptor) as client:
            meta = await client.put("a", ["k"], BatchData({"x": dense([1])}))
            held = [await client.get(meta)]

            def call(method: Callable[[], Coroutine[Any, Any, object]]) -> Callable[[], object]:
                return lambda: method().send(None)  # the loop runs already

            assert in_a_fork(call(lambda: client.list_rows("a", timeout_s=3))) == AFTER_FORK
            assert in_a_fork(call(lambda: client.get(meta))) == AFTER_FORK
            assert in_a_fork(call(client.close)) == AFTER_FORK
            assert in_a_fork(held.clear) == "None"
            assert (await client.get(meta)).dense("x").values.tolist() == [1]

    asyncio.run(body())


EXITING = """
import sys
from rl_protocol import BatchData, dense
from rl_transferqueue import PlaneDescriptor, connect_blocking

client = connect_blocking(PlaneDescriptor.from_json(sys.argv[1]))
kept = client.get(client.put("p", ["a"], BatchData({"x": dense([1.0])})))
"""


def test_a_process_that_forgets_to_close_ends_at_once(plane: LocalPlane) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXITING, plane.descriptor.to_json()],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_views_dropped_in_other_threads_and_after_close_give_their_memory_back(plane: LocalPlane) -> None:
    async def read(count: int) -> list[np.ndarray]:
        async with await connect(plane.descriptor) as client:
            meta = await client.put("p", ["a"], BatchData({"x": dense(np.ones((1, 1 << 20), np.uint8))}))
            return [(await client.get(meta)).dense("x").values for _ in range(count)]

    async def used() -> int:
        async with await connect(plane.descriptor) as client:
            await client.clear("p")
            return (await client.stats()).bytes_used

    views = asyncio.run(read(40))
    assert asyncio.run(used()) == 1 << 20
    halves = [views[:20], views[20:]]
    del views
    threads = [threading.Thread(target=half.clear) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Each view was reported on the connection of the closed client, and no answer says when.
    deadline = time.monotonic() + 60
    while asyncio.run(used()):
        assert time.monotonic() < deadline, "the memory did not come back"
