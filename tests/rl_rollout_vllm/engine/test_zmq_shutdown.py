"""The shutdown of vLLM's ZeroMQ context."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace

from rl_rollout_vllm.engine import zmq_shutdown


def test_a_context_is_ended_by_another_thread_while_the_loop_closes_its_sockets(caplog):
    """Pitfall: closing a ZeroMQ context waits for its sockets, which vLLM closes on the loop."""
    closed, ended = threading.Event(), []

    async def scenario():
        asyncio.get_running_loop().call_later(0.05, closed.set)
        await zmq_shutdown.terminate_context(SimpleNamespace(term=lambda: ended.append(closed.wait(60))))

    asyncio.run(scenario())
    assert ended == [True]
    assert not caplog.records


def test_a_context_whose_socket_stays_open_blocks_nothing(monkeypatch, caplog):
    monkeypatch.setattr(zmq_shutdown, "_TIMEOUT_S", 0.05)
    closed = threading.Event()
    with caplog.at_level(logging.WARNING):
        asyncio.run(zmq_shutdown.terminate_context(SimpleNamespace(term=closed.wait)))
    assert "not closed all of its sockets within 0.05 s" in caplog.text
    (waiting,) = (each for each in threading.enumerate() if each.name == "rl-rollout-vllm-zmq")
    assert waiting.daemon
    closed.set()
    waiting.join(60)
