"""Closed endpoints."""

from __future__ import annotations

import asyncio

import pytest
from ckpt_fakes import Sink, Source, model

from rl_ckpt_engine import CheckpointEngine, CheckpointEngineManager, ReceiverEndpoint, SenderEndpoint
from rl_ckpt_engine.engines.network.tcp import TcpEngine
from rl_ckpt_engine.engines.one_host.naive import NaiveEngine
from rl_ckpt_engine.engines.one_host.shm import ShmEngine
from rl_protocol.errors import WeightSyncError

ENGINES = [NaiveEngine, ShmEngine, TcpEngine]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_closed_sender_sends_nothing(engine: type[CheckpointEngine], caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink(model(0))
    sender, receiver = SenderEndpoint(engine(), Source(model(1))), ReceiverEndpoint(engine(), sink)
    manager = CheckpointEngineManager(sender, [receiver])
    asyncio.run(manager.update_weights(1))
    sender.close()
    sender.close()
    with pytest.raises(WeightSyncError, match="send: the sender failed: This SenderEndpoint is closed; make another"):
        asyncio.run(manager.update_weights(2))
    assert sink.weight_version == 1
    assert receiver.admitting
    assert caplog.text == ""  # there was nothing to withdraw
    receiver.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_closed_receiver_is_quarantined(engine: type[CheckpointEngine]) -> None:
    sender = SenderEndpoint(engine(), Source(model(1)))
    closed, other = (ReceiverEndpoint(engine(), Sink(model(0)), name=name) for name in ("closed", "other"))
    manager = CheckpointEngineManager(sender, [closed, other])
    asyncio.run(manager.update_weights(1))
    closed.close()
    closed.close()
    assert asyncio.run(manager.update_weights(2)).receivers == ("other",)
    assert "This ReceiverEndpoint is closed" in manager.quarantined["closed"]
    sender.close()
    other.close()
