"""VersionSender: it frees the memory of a version whose send it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from ckpt_pair import WEIGHTS, T

from rl_ckpt_engine.engines.base.memfd import Slot
from rl_ckpt_engine.engines.base.version_sender import VersionSender
from rl_ckpt_engine.payload import block_stream
from rl_ckpt_engine.payload.manifest import Manifest
from rl_protocol import WeightSyncError


class Store(Slot):
    closed = False

    def close(self) -> None:
        super().close()
        self.closed = True


def stop_during_send(sender: VersionSender[Store], stop: Callable[[VersionSender[Store]], None]) -> Store:
    """The store of a send that was stopped after its first tensor."""

    async def run() -> Store:
        sending = asyncio.create_task(sender.send(WEIGHTS, 1, timeout_s=T, kind="full"))
        await asyncio.sleep(0)  # it has written a chunk
        store = sender.newest
        assert store is not None
        stop(sender)
        with pytest.raises(WeightSyncError, match="Sending version 1"):
            await sending
        return store

    return asyncio.run(run())


def test_a_send_during_close_frees_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_stream, "CHUNK_BYTES", 1)
    sender = VersionSender("tcp", Store, bytes)
    store = stop_during_send(sender, VersionSender.close)
    assert store.closed
    assert not sender.free


def test_a_send_that_is_aborted_keeps_its_store_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_stream, "CHUNK_BYTES", 1)
    sender = VersionSender("tcp", Store, bytes)
    store = stop_during_send(sender, VersionSender.abort)
    assert sender.free == [store]
    assert not store.closed
    sender.close()
    assert store.closed


def test_a_store_that_can_not_be_withdrawn_does_not_stop_later_versions() -> None:
    class Broken(Store):
        def complete(self, manifest: Manifest) -> None:
            raise WeightSyncError("the actor is gone")

        def withdraw(self) -> None:
            raise WeightSyncError("the actor is gone")

        def begin(self, version: int) -> None:
            """Withdraw nothing."""

    sender = VersionSender[Store]("ray", Broken, bytes)
    for version in (1, 2):
        with pytest.raises(WeightSyncError, match="the actor is gone"):
            asyncio.run(sender.send(WEIGHTS, version, timeout_s=T, kind="full"))
    sender.close()
