"""The sync twin, its portal, and leases that end anywhere."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rl_protocol import BatchData, MissingDataError, PlaneTimeout, dense
from rl_protocol.testing.fakes import MemoryDataPlane
from rl_transferqueue import BlockingPlane, LocalPlane, Portal, connect, connect_blocking, portal


def test_every_method_works_without_async(plane: LocalPlane) -> None:
    client = connect_blocking(plane.descriptor)
    meta = client.put("p", ["a", "b"], BatchData({"x": dense([1, 2])}), tags=[{"n": 1}, {"n": 2}])
    assert client.get(meta).dense("x").values.tolist() == [1, 2]
    assert client.wait_ready("p", count=1, where={"n": 2}, timeout_s=5).keys == ("b",)
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


def test_any_plane_has_a_sync_twin() -> None:
    own = Portal()
    twin = BlockingPlane(MemoryDataPlane(), own)
    twin.put("p", ["a"], tags=[{"n": 1}])
    assert twin.list_rows("p").tags == ({"n": 1},)
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
    """One loop for the process, whoever calls: not a loop per call that is never closed, not a thread per call."""
    client = connect_blocking(plane.descriptor)

    def calls(count: int) -> tuple[int, int]:
        for i in range(count):
            meta = client.put("p", [f"k{i % 7}"], BatchData({"x": dense([i])}), tags=[{"n": i}])
            assert client.get(meta).dense("x").values[0] == i
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    descriptors, threads = calls(5)
    more_descriptors, more_threads = calls(300)
    assert more_descriptors <= descriptors  # fewer when objects of earlier tests are collected meanwhile
    assert more_threads <= threads
    client.close()


def test_waiting_for_oneself_is_refused() -> None:
    async def inner() -> None:
        portal().run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="wait for itself"):
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
    thread.join(5)
    assert len(seen) == 1


def test_a_call_that_heeds_no_cancellation_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_transferqueue.blocking.CLOSE_S", 0.1)
    own, asked = Portal(), threading.Event()

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                asked.set()

    own.submit(stubborn())
    own.close()
    assert asked.is_set()
    assert not any(thread is own._thread for thread in threading.enumerate())


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
        timeout=10,
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
            await asyncio.sleep(0.05)
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
    assert asyncio.run(used()) == 0
